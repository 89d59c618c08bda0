"""H2O: the heavy hitters by accumulated attention, and a recent window of half the budget.

Zhang, Sheng, Zhou, Chen, Zheng, Cai, Song, Tian, Re, Barrett, Wang, Chen: H2O: Heavy-Hitter Oracle for Efficient
Generative Inference of Large Language Models, arXiv 2306.14048, Algorithm 1. `observe=256` reproduces the simulation of
H2O in CriticalKV's experiments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kvbench.parts import TopK, Uniform, portion
from kvbench.plugin import AttentionMass, Need, Policy, Range, Score, Scores, View, protect_nothing, protect_window
from kvbench_policies.ranges import check_count, check_share


@dataclass(frozen=True)
class Accumulated(Score):
    """`s_i = sum_q A[q, i]` over all queries; nothing is protected.

    This is D2O's score; its selector `important_recent` takes the window from each head's own budget.

    Attributes:
        observe: Count only the last N prefill queries; None counts all.
        group: Reduction over the query heads of a KV head: `mean`, `max` or `sum`.
    """

    name: ClassVar[str] = "accumulated"
    nonnegative: ClassVar[bool] = True
    observe: int | None = None
    group: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.observe is not None:
            check_count("observe", self.observe, 1, "queries, or none")

    @property
    def needs(self) -> frozenset[Need]:
        """Accumulated attention per entry."""
        return frozenset({AttentionMass(self.observe)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        accumulated = v.grouped(v.obs[AttentionMass(self.observe)], self.group)
        return Scores(accumulated, protect_nothing(v))


@dataclass(frozen=True)
class AccumulatedAttention(Accumulated):
    """`s_i = sum_q A[q, i]` over all queries, exactly; the most recent tokens are protected.

    The sum keeps accumulating after an eviction step.

    Attributes:
        recent: Fraction of `b` for the protected recent window: `floor(recent * b)` tokens.
        observe: Count only the last N prefill queries; None counts all.
        group: Reduction over the query heads of a KV head: `mean`, `max` or `sum`.
    """

    name: ClassVar[str] = "mass"
    searched: ClassVar[Mapping[str, Range]] = {"recent": Range(0.0, 0.9)}
    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("recent", self.recent)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        protection = protect_window(v, portion(v.budget, self.recent))
        return replace(super().score(v), protect=protection)


H2O = Policy(
    name="h2o",
    score=AccumulatedAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the entries with the largest accumulated attention; half the budget is a recent window",
    paper="arXiv 2306.14048, Algorithm 1",
    moments=("context", "question", "decode"),
    cost="time O(H_q T^2 d) during the prefill, by blocks; memory O(H_q T)",
)
