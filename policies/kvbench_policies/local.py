"""Local window: the most recent tokens, D2O's "local window" baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Range, Score, Scores, View, protect_nothing, protect_sinks
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class Recency(Score):
    """`s_i = i - t <= 0`: the more recent a token, the higher its score.

    Attributes:
        sinks: Number of protected first tokens. With sinks, the newest token is protected, too: a head's budget that
            cannot hold all of them keeps the newest token, then the first sinks.
    """

    name: ClassVar[str] = "recency"
    searched: ClassVar[Mapping[str, Range]] = {"sinks": Range(0, 64)}
    sinks: int = 0

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)

    @property
    def version(self) -> int:
        """2 with two or more sinks: the last sink is now dropped first if the sinks do not fit."""
        return 2 if self.sinks > 1 else 1

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, `[B, H, n]`."""
        protection = protect_nothing(v)
        if self.sinks:
            newest_class = ((v.age == 0) & v.valid).to(torch.int8) * Scores.NEWEST
            protection = torch.maximum(protect_sinks(v, self.sinks), newest_class)
        return Scores(-v.age.float(), protection)


LOCAL = Policy(
    name="local",
    score=Recency(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the most recent tokens",
    paper="D2O, arXiv 2406.13035 (baseline 'local window')",
    moments=("context", "question", "decode"),
    cost="time and memory O(H T)",
)
