"""A local window: the most recent tokens, the "local window" baseline of D2O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Score, Scores, View, protect_nothing, protect_sinks
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class Recency(Score):
    """`s_i = i - t <= 0`: the more recent a token, the higher its score.

    Attributes:
        sinks: Number of first tokens that are protected (0 protects none). With sinks the newest
            token is protected as well: a share that cannot hold all of them keeps the newest token
            and then the first sinks.
    """

    name: ClassVar[str] = "recency"
    sinks: int = 0

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)

    @property
    def version(self) -> int:
        """2 with two or more sinks: of sinks that do not fit, the last now gives way first."""
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
