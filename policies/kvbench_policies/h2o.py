"""H2O: the heavy hitters of accumulated attention, and a recent window of half the budget.

Zhang, Sheng, Zhou, Chen, Zheng, Cai, Song, Tian, Re, Barrett, Wang, Chen: H2O: Heavy-Hitter Oracle
for Efficient Generative Inference of Large Language Models, arXiv 2306.14048, Definition 4.3 and
Algorithm 1. `observe=256` is the simulation of H2O in CriticalKV's experiments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform, portion
from kvbench.plugin import AttentionMass, Need, Policy, Score, Scores, View, protect_window


@dataclass(frozen=True)
class AccumulatedAttention(Score):
    """`s_i = sum_q A[q, i]` over all queries, exact; the most recent tokens are protected.

    The sum goes on at decode: the mass that a step's queries give is added to what was there, per
    KV head (with `group=max` the largest of the step's query heads).

    Attributes:
        recent: Share of `b` that the protected recent window takes: `floor(recent * b)` tokens.
        observe: Count the last so many queries alone (none: all of them).
        group: How the query heads of a KV head are reduced: `mean`, `max` or `sum`.
    """

    name: ClassVar[str] = "mass"
    nonnegative: ClassVar[bool] = True
    extras: ClassVar[Mapping[str, torch.dtype]] = {"mass": torch.float32}
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
        return frozenset({self._need})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        if self._need in v.obs:  # a prefill; from then on the extras carry the sum
            v.extras["mass"] = self._received(v)
        return Scores(v.extras["mass"], protect_window(v, portion(v.budget, self.recent)))

    def step(self, v: View) -> None:
        """Add the mass that the step's queries gave."""
        v.extras["mass"] = v.extras["mass"] + self._received(v)

    @property
    def _need(self) -> AttentionMass:
        return AttentionMass(self.observe)

    def _received(self, v: View) -> Tensor:
        return v.grouped(v.obs[self._need], self.group)


H2O = Policy(
    name="h2o",
    score=AccumulatedAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps what got most attention from all queries; half of the budget is a recent window",
    paper="arXiv 2306.14048, Algorithm 1",
)
