"""Budgets: parsed from the user's spelling and resolved once to a number of cache entries."""

from __future__ import annotations

import math
import numbers
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fractions import Fraction

from kvbench.errors import UserError, quoted

_RIGHT = (
    "use the fraction KEPT such as 0.2, a number of tokens such as 512, full, or visual:64 (all "
    "text and 64 visual tokens)"
)
_VISUAL = "visual:"
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Budget:
    """Entries kept per (layer, KV head) on average: a fraction of the context or a token count.

    Exactly one of `ratio` and `tokens` is set; `full` is ratio 1. The `int` 1 is ONE token, the `float` 1.0 is the
    whole cache.

    Attributes:
        ratio: Fraction of the context to keep.
        tokens: Number of tokens to keep.
        visual: Whether ratio or tokens count visual tokens only; the number of text tokens is then added to the budget
            (arXiv:2605.09649, section 5.1). The policy decides which entries are kept.
    """

    ratio: Fraction | None = None
    tokens: int | None = None
    visual: bool = False

    @classmethod
    def parse(cls, value: object) -> Budget:
        """Parse a budget.

        Args:
            value: `"0.2"`, `"512"`, `"full"`, `"visual:0.2"`, `"visual:64"`, an int (tokens, >= 1) or a float in
                (0, 1].

        Raises:
            UserError: The value is none of these.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool):
            raise UserError(f"budget {quoted(value)} is not a number; {_RIGHT}")
        if isinstance(value, numbers.Integral):
            if not 1 <= int(value) <= _LARGEST:
                raise UserError(f"budget {quoted(value)} is out of range; {_RIGHT}")
            return cls(tokens=int(value))
        spelling = str(value).strip()
        if spelling.startswith(_VISUAL):
            inner_budget = cls.parse(spelling.removeprefix(_VISUAL))
            if inner_budget.visual:
                raise UserError(f"budget {quoted(spelling)} contains visual twice; {_RIGHT}")
            return inner_budget if inner_budget.is_full else replace(inner_budget, visual=True)
        if spelling == "full":
            return cls(ratio=Fraction(1))
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,400}", spelling):
            return cls.parse(int(spelling))
        try:
            if not spelling.isascii() or spelling.startswith("+") or "_" in spelling or "/" in spelling:
                raise ValueError
            float_value = float(spelling)
            if not math.isfinite(float_value):
                raise ValueError
            ratio = Fraction(spelling)
        except ValueError:
            raise UserError(f"budget {quoted(spelling)} is not a number; {_RIGHT}") from None
        if 0 < ratio <= 1 and Fraction(repr(float_value)) != ratio:
            raise UserError(f"budget {spelling} has more digits than a float can hold; {_RIGHT}")
        if not 0 < ratio <= 1:
            raise UserError(f"budget {spelling} is out of range; {_RIGHT}")
        return cls(ratio=ratio)

    @property
    def is_full(self) -> bool:
        """Whether all entries are kept, regardless of the context."""
        return self.ratio == 1

    @property
    def absolute(self) -> int | None:
        """The number of tokens if the budget is the same for every context, otherwise None."""
        return None if self.visual else self.tokens

    def per_head(self, length: int, visual_tokens: int = 0) -> int:
        """Return the entries kept per (layer, KV head) on average, `b`.

        Args:
            length: Valid context tokens of the sequence, `T`.
            visual_tokens: Number of tokens that belong to images and videos, `V`.

        Returns:
            `max(1, floor(ratio * T + 1/2))` in exact arithmetic, or `min(tokens, T)`. A visual budget is `T - V` plus
            the same for `V`.
        """
        if self.visual:
            if not visual_tokens:
                return length
            return length - visual_tokens + replace(self, visual=False).per_head(visual_tokens)
        if self.tokens is not None:
            return max(1, min(self.tokens, length))
        assert self.ratio is not None
        return max(1, math.floor(self.ratio * length + Fraction(1, 2)))

    def is_filled(self, reserved: Callable[[int], int], lengths: Collection[int]) -> bool:
        """Return whether reserved entries use up the budget in most contexts.

        Args:
            reserved: `Part.reserved`: number of entries that every head always keeps.
            lengths: Tokens of the contexts. Contexts that fit into the budget do not count.
        """
        if self.visual:
            return False
        filled_count = 0
        for length, count in Counter(lengths).items():  # exact fractions are slow, and most contexts share a length
            reserved_count = min(reserved(length), length - 1)
            if reserved_count > 0 and reserved_count >= self.per_head(length):
                filled_count += count
        return 2 * filled_count > len(lengths)

    def __str__(self) -> str:
        if self.visual:
            return f"{_VISUAL}{replace(self, visual=False)}"
        if self.is_full:
            return "full"
        if self.tokens is not None:
            return str(self.tokens)
        assert self.ratio is not None
        return repr(float(self.ratio))
