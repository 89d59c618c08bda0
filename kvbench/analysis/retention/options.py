"""The options of `kvbench analyze retention` in addition to a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbench.analysis.choosing import drawn, parse_integers, split_commas
from kvbench.errors import UserError
from kvbench.runs import values
from kvbench.runs.options import ANALYSIS, CACHE, WHAT, Options, declare

MOMENTS = ("decode", "context")
"""Eviction token by token along the text, or once after the context."""

TOP = (16, 64, 256)
MASS = (0.9, 0.99)
MOST_LAYERS = 6
MOST_HEADS = 8


def _ranks(value: Any) -> tuple[int, ...]:
    ranks = value if isinstance(value, tuple) else parse_integers("top", split_commas(value), "16,64")
    for rank in ranks:
        if rank < 1:
            raise UserError(f"--top {rank}: use numbers of entries from 1, such as 64")
    return ranks


def _shares(value: Any) -> tuple[float, ...]:
    numerals = list(value) if isinstance(value, tuple) else split_commas(value)
    try:
        shares = tuple(float(numeral) for numeral in numerals)
    except ValueError:
        raise UserError(f"--mass {','.join(numerals)}: use comma-separated shares, such as 0.9,0.99") from None
    for share in shares:
        if not 0 < share < 1:
            raise UserError(f"--mass {share:g}: use shares between 0 and 1, such as 0.9")
    return shares


@dataclass(frozen=True)
class RetentionOptions(Options):
    """Options of the retention analysis; `kvbench analyze retention --help` explains each."""

    text: str | None = declare(
        None, values.optional(values.text("text")), str, WHAT, "FILE",
        "Analyse this text instead of a task.",
    )  # fmt: skip
    moment: str = declare(
        "decode", values.choice("moment", MOMENTS), str, CACHE, "WHEN",
        "decode: token by token through the text (the default); context: once, at the end of the "
        "context.", complete="moments",
    )  # fmt: skip
    traces: int = declare(
        1, values.at_least("traces", 1), int, ANALYSIS, "N",
        "Texts to run policies on and to show. Default: 1.",
    )  # fmt: skip
    new_tokens: int | None = declare(
        None, values.optional(values.at_least("new-tokens", 0)), int, ANALYSIS, "N",
        "Maximum number of tokens to generate after a text. Default: the task's limit; 0 with --text.",
    )  # fmt: skip
    layers: tuple[int, ...] | None = drawn("layers", "L")
    heads: tuple[int, ...] | None = drawn("heads", "H")
    top: tuple[int, ...] = declare(
        TOP, _ranks, list, ANALYSIS, "K",
        "Ranks for survival among the top K, comma-separated. Default: 16,64,256.",
    )  # fmt: skip
    mass: tuple[float, ...] = declare(
        MASS, _shares, list, ANALYSIS, "P",
        "Fractions of attention for survival, comma-separated. Default: 0.9,0.99.",
    )  # fmt: skip
    horizon: int | None = declare(
        None, values.optional(values.at_least("horizon", 1)), int, ANALYSIS, "STEPS",
        "Number of steps to follow survival for. Default: half of the text.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.top and not self.mass:
            raise UserError("survival needs a criterion; use --top 64 or --mass 0.9")

    @property
    def criteria(self) -> list[tuple[str, float]]:
        """Survival criteria (name and value) in table order."""
        rank_criteria: list[tuple[str, float]] = [("top", float(rank)) for rank in self.top]
        return rank_criteria + [("mass", share) for share in self.mass]
