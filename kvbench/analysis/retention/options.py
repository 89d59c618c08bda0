"""Parsing and validation of the non-grid options of `kvbench analyze retention`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.analysis.choosing import (
    check_minimums,
    json_values,
    parse_integers,
    parse_integers_or_all,
    split_commas,
)
from kvbench.errors import UserError, nearest

MOMENTS = ("decode", "context")
"""Eviction token by token along the text, or once after the context."""

TOP = (16, 64, 256)
MASS = (0.9, 0.99)
MOST_LAYERS = 6
MOST_HEADS = 8


@dataclass(frozen=True)
class RetentionOptions:
    """Options of the retention analysis.

    Attributes:
        moment: One of `MOMENTS`.
        top: Survival criteria: an entry is in use if it is among this many of the largest logits.
        mass: Survival criteria: an entry is in use if it is in the smallest set with this fraction of the attention.
        horizon: Number of steps to follow survival for; None for half of the shortest text.
        layers, heads: Layers (the model's index) and KV heads to draw; None for a few, evenly spaced, and empty for
            all.
        traces: Texts per task to run the policies on.
        new_tokens: Tokens that the model appends to each text; None for the task's limit.
        text: File to analyse instead of tasks.
    """

    moment: str = "decode"
    top: tuple[int, ...] = TOP
    mass: tuple[float, ...] = MASS
    horizon: int | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    traces: int = 1
    new_tokens: int | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            UserError: A value is out of range.
        """
        if self.moment not in MOMENTS:
            hint = nearest(self.moment, MOMENTS) or f"; use {' or '.join(MOMENTS)}"
            raise UserError(f"--moment {self.moment}{hint}")
        check_minimums(self, {"horizon": 1, "traces": 1, "new_tokens": 0})
        for top_count in self.top:
            if top_count < 1:
                raise UserError(f"--top {top_count}: use numbers of entries from 1, such as 64")
        for share in self.mass:
            if not 0 < share < 1:
                raise UserError(f"--mass {share:g}: use shares between 0 and 1, such as 0.9")
        if not self.top and not self.mass:
            raise UserError("survival needs a criterion; use --top 64 or --mass 0.9")

    @classmethod
    def read(cls, flags: Mapping[str, Any]) -> RetentionOptions:
        """Parse flags; a flag that is None was not given.

        Args:
            flags: Values by attribute. Lists are texts with commas; layers and heads may be `all`.

        Raises:
            UserError: A value cannot be parsed or is out of range.
        """
        parsed = {attribute: flag_value for attribute, flag_value in flags.items() if flag_value is not None}
        for flag in ("layers", "heads"):
            if flag in parsed:
                parsed[flag] = parse_integers_or_all(flag, parsed[flag])
        if "top" in parsed:
            parsed["top"] = parse_integers("top", split_commas(parsed["top"]), "16,64")
        if "mass" in parsed:
            parsed["mass"] = _shares(split_commas(parsed["mass"]))
        return cls(**parsed)

    @property
    def criteria(self) -> list[tuple[str, float]]:
        """Survival criteria (name and value) in table order."""
        rank_criteria: list[tuple[str, float]] = [("top", float(top_count)) for top_count in self.top]
        return rank_criteria + [("mass", share) for share in self.mass]

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a JSON-serialisable dict."""
        return json_values(self)


def _shares(share_texts: list[str]) -> tuple[float, ...]:
    try:
        return tuple(float(share_text) for share_text in share_texts)
    except ValueError:
        raise UserError(f"--mass {','.join(share_texts)}: use shares with commas, such as 0.9,0.99") from None
