"""A budget as the user writes it, resolved once to a number of cache entries."""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass
from fractions import Fraction

from kvbench.errors import UserError

_RIGHT = "use the fraction KEPT such as 0.2, a number of tokens such as 512, or full"


@dataclass(frozen=True)
class Budget:
    """Entries kept per (layer, KV head) on average: a fraction of the context or a token count.

    Exactly one of `ratio` and `tokens` is set; `full` is ratio 1. The `int` 1 is ONE token, the
    `float` 1.0 is the whole cache.
    """

    ratio: Fraction | None = None
    tokens: int | None = None

    @classmethod
    def parse(cls, value: object) -> Budget:
        """Read a budget.

        Args:
            value: `"0.2"`, `"512"`, `"full"`, an int (tokens, >= 1) or a float in (0, 1].

        Raises:
            UserError: The value is none of these.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool):
            raise UserError(f"budget {value!r} is not a number; {_RIGHT}")
        if isinstance(value, numbers.Integral):
            if value < 1:
                raise UserError(f"budget {value} is out of range; {_RIGHT}")
            return cls(tokens=int(value))
        text = str(value).strip()
        if text == "full":
            return cls(ratio=Fraction(1))
        if isinstance(value, str) and re.fullmatch(r"[0-9]+", text):
            return cls.parse(int(text))
        try:
            if not text.isascii() or text.startswith("+") or "_" in text or "/" in text:
                raise ValueError
            number = float(text)
            if not math.isfinite(number):
                raise ValueError
            ratio = Fraction(text)
        except ValueError:
            raise UserError(f"budget {text!r} is not a number; {_RIGHT}") from None
        if 0 < ratio <= 1 and Fraction(repr(number)) != ratio:
            raise UserError(f"budget {text} has more digits than a float can hold; {_RIGHT}")
        if not 0 < ratio <= 1:
            raise UserError(f"budget {text} is out of range; {_RIGHT}")
        return cls(ratio=ratio)

    @property
    def is_full(self) -> bool:
        """Whether everything is kept, regardless of the context."""
        return self.ratio == 1

    def per_head(self, length: int) -> int:
        """Entries kept per (layer, KV head) on average, `b`.

        Args:
            length: Valid context tokens of the sequence, `T`.

        Returns:
            `max(1, floor(ratio * T + 1/2))` in exact arithmetic, or `min(tokens, T)`.
        """
        if self.tokens is not None:
            return max(1, min(self.tokens, length))
        assert self.ratio is not None
        return max(1, math.floor(self.ratio * length + Fraction(1, 2)))

    def __str__(self) -> str:
        if self.is_full:
            return "full"
        if self.tokens is not None:
            return str(self.tokens)
        assert self.ratio is not None
        return repr(float(self.ratio))
