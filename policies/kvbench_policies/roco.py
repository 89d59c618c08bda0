"""RoCo: mean attention per query, with the entries of most varied attention protected.

Ren, Zhu: On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model
Inference, arXiv 2402.06262.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform, portion, rank_entries
from kvbench.plugin import (
    AttentionMass,
    Need,
    Policy,
    Score,
    Scores,
    View,
    protect_nothing,
    protect_sinks,
    protect_window,
)

_PREFILL, _DECODE = 0.1, 0.3
"""Default shares of `b` that the entries of largest standard deviation take."""


@dataclass(frozen=True)
class MeanAttention(Score):
    """Attention per query that could see the entry; what received it unevenly is protected.

        s_i = 1/c_i sum_q A[q, i],    std_i = sqrt( 1/c_i sum_q A[q, i]^2 - s_i^2 ),    c_i = T - i

    `c_i` counts the queries since the token itself came, at a later cut too: what is held was seen
    by all of them. The deviation is taken in each query head and then reduced over the group.

    Protected are the `floor(b_std * b)` entries of largest deviation among all that the head holds,
    the last `window` tokens and, except at decode, the first `sinks`. A share that cannot hold all
    of them gives up those of large deviation first, in the order in which RoCo evicts (least mean
    attention), then the oldest of the window, then sinks; the newest token stays.

    Attributes:
        b_std: Share of `b` that the entries of largest deviation take; none: 0.1, at decode 0.3.
        window: Last tokens that are protected.
        sinks: First tokens that are protected, except at decode.
        group: How the query heads of a KV head are reduced: `mean`, `max` or `sum`.
    """

    name: ClassVar[str] = "roco"
    nonnegative: ClassVar[bool] = True
    b_std: float | None = None
    window: int = 10
    sinks: int = 4
    group: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.b_std is not None and not 0 <= self.b_std <= 1:
            raise UserError(
                f"b_std={self.b_std}: a share of the budget in [0, 1] or none would be right"
            )
        for key, count in (("window", self.window), ("sinks", self.sinks)):
            if count < 0:
                raise UserError(f"{key}={count}: a number of tokens, 0 or more, would be right")

    @property
    def needs(self) -> frozenset[Need]:
        """The attention that every entry received, and its squares."""
        return frozenset({AttentionMass(), AttentionMass(power=2)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        mean, std = self._moments(v)
        decoding = v.moment == "decode"
        share = self.b_std if self.b_std is not None else _DECODE if decoding else _PREFILL
        rank = rank_entries(Scores(std, protect_nothing(v)), v.valid)
        varied = (rank < portion(v.budget, share)[:, None, None]) & v.valid
        protect = torch.maximum(
            varied.to(torch.int8) * Scores.CHOSEN, protect_window(v, self.window)
        )
        if not decoding:
            protect = torch.maximum(protect, protect_sinks(v, self.sinks))
        return Scores(mean, protect)

    def _moments(self, v: View) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the attention received, float32 `[B, H, n]` each."""
        count = (v.age + 1).clamp(min=1).repeat_interleave(v.model.group, 1)
        # In float64: the variance is the difference of two numbers that may be nearly equal.
        mean = v.obs[AttentionMass()].double() / count
        variance = v.obs[AttentionMass(power=2)].double() / count - mean.square()
        std = variance.clamp(min=0.0).sqrt()
        return self._per_head(v, mean), self._per_head(v, std)

    def _per_head(self, v: View, per_query_head: Tensor) -> Tensor:
        return v.grouped(per_query_head, self.group).float().masked_fill(~v.valid, 0.0)


ROCO = Policy(
    name="roco",
    score=MeanAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps what got most attention per query; protects what got it most unevenly",
    paper="arXiv 2402.06262",
    moments=("context", "question", "decode"),
    cost="time O(H_q T^2 d) for two passes of column sums, memory O(H_q T)",
)
