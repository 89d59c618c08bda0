"""The options of `kvbench tune` in addition to a grid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UserError
from kvbench.runs import values
from kvbench.runs.options import FLAG, WHAT, Options, declare

SEARCH = "Search"
BY_SCORE, BY_KL, BY_BOTH = "score", "kl", "both"

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def _seconds(value: Any) -> int:
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d+)\s*([smh])", str(value).strip())
    if match is None or int(match[1]) == 0:
        raise UserError(f"--time {value}: use a number and a unit, such as 90s, 30m or 2h")
    return int(match[1]) * _SECONDS[match[2]]


@dataclass(frozen=True)
class TuneOptions(Options):
    """Options of the search; `kvbench tune --help` explains each."""

    time: int | None = declare(
        None, values.optional(_seconds), str, SEARCH, "TIME",
        "Begin no round that would end later, such as 30m or 2h. Without --trials, the default is 30m.",
    )  # fmt: skip
    trials: int | None = declare(
        None, values.optional(values.at_least("trials", 1)), int, SEARCH, "N",
        "Number of settings to try, in addition to the named policies. Default: as many as --time allows.",
    )  # fmt: skip
    round_size: int = declare(
        24, values.at_least("round-size", 3), int, SEARCH, "N",
        "Settings of a round; all share one prefill per context. Default: 24.",
    )  # fmt: skip
    by: str = declare(
        BY_SCORE, values.choice("by", (BY_SCORE, BY_KL, BY_BOTH)), str, SEARCH, "WHAT",
        "What to search for: score (the default); kl, answers whose next-token distributions are closest to the full "
        "cache's, which needs no reference answers; both, the score, and kl among equal scores.",
    )  # fmt: skip
    held_out: int = declare(
        50, values.at_least("held-out", 1), int, SEARCH, "N",
        "Samples per task that the search does not see, on which the winner is compared. Default: 50.",
    )  # fmt: skip
    score: tuple[str, ...] | None = declare(
        None, values.optional(values.names("score")), list, WHAT, "NAME",
        "Scores to try, comma-separated. Default: all that need no file made for the model.",
    )  # fmt: skip
    allocate: tuple[str, ...] | None = declare(
        None, values.optional(values.names("allocate")), list, WHAT, "NAME", "Allocators to try.",
    )  # fmt: skip
    select: tuple[str, ...] | None = declare(
        None, values.optional(values.names("select")), list, WHAT, "NAME", "Selectors to try.",
    )  # fmt: skip
    merge: tuple[str, ...] | None = declare(
        None, values.optional(values.names("merge")), list, WHAT, "NAME", "Mergers to try; none is one of them.",
    )  # fmt: skip
    with_files: bool = declare(
        False, values.truth("with_files"), bool, WHAT, FLAG,
        "Also try parts that read a file made for the model: gates, profiles of heads, filters of queries.",
    )  # fmt: skip

    @property
    def restricted(self) -> dict[str, tuple[str, ...]]:
        """Return the parts to try by kind, for the kinds that the user restricted."""
        given = {"score": self.score, "allocate": self.allocate, "select": self.select, "merge": self.merge}
        return {kind: names for kind, names in given.items() if names is not None}
