"""H2O: the heavy hitters of accumulated attention, and a recent window of half the budget.

Zhang, Sheng, Zhou, Chen, Zheng, Cai, Song, Tian, Re, Barrett, Wang, Chen: H2O: Heavy-Hitter Oracle
for Efficient Generative Inference of Large Language Models, arXiv 2306.14048,
Algorithm 1. `observe=256` is the simulation of H2O in CriticalKV's experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform, portion
from kvbench.plugin import AttentionMass, Need, Policy, Score, Scores, View, protect_window


@dataclass(frozen=True)
class AccumulatedAttention(Score):
    """`s_i = sum_q A[q, i]` over all queries, exact; the most recent tokens are protected.

    The sum goes on after a cut: what new queries give is added to what was there.

    Attributes:
        recent: Share of `b` that the protected recent window takes: `floor(recent * b)` tokens.
        observe: Count the last so many queries alone (none: all of them).
        group: How the query heads of a KV head are reduced: `mean`, `max` or `sum`.
    """

    name: ClassVar[str] = "mass"
    nonnegative: ClassVar[bool] = True
    recent: float = 0.5
    observe: int | None = None
    group: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.recent <= 1:
            raise UserError(f"recent={self.recent}: a share of the budget in [0, 1] would be right")
        if self.observe is not None and self.observe < 1:
            raise UserError(
                f"observe={self.observe}: a number of queries, 1 or more, or none would be right"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """The attention that every entry received."""
        return frozenset({AttentionMass(self.observe)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        value = v.grouped(v.obs[AttentionMass(self.observe)], self.group)
        return Scores(value, protect_window(v, portion(v.budget, self.recent)))


H2O = Policy(
    name="h2o",
    score=AccumulatedAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps what got most attention from all queries; half of the budget is a recent window",
    paper="arXiv 2306.14048, Algorithm 1",
    moments=("context", "question", "decode"),
    cost="time O(H_q T^2 d) during the prefill, by blocks; memory O(H_q T)",
)
