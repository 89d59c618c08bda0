"""RoCo: mean attention per query; entries with the most variable attention are protected.

Ren, Zhu: On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference, arXiv
2402.06262.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform, portion, rank_entries
from kvbench.plugin import (
    AttentionMass,
    Need,
    Policy,
    Range,
    Score,
    Scores,
    View,
    protect_nothing,
    protect_sinks,
    protect_window,
)
from kvbench_policies.ranges import check_count, check_share

_PREFILL, _DECODE = 0.1, 0.3
"""Default fraction of `b` for the entries with the largest standard deviation."""


@dataclass(frozen=True)
class MeanAttention(Score):
    """Mean attention over the queries that can see an entry; variable attention protects it.

        s_i = 1/c_i sum_q A[q, i],    std_i = sqrt( 1/c_i sum_q A[q, i]^2 - s_i^2 ),    c_i = T - i

    `c_i` counts the queries from the token's own onwards, at every eviction step, because each of them saw every held
    entry. The deviation is computed per query head and then reduced over the group.

    Protected are the `floor(b_std * b)` entries of a head with the largest deviation, the last `window` tokens and,
    except at decode, the first `sinks` tokens. If a head's budget cannot hold all of them, entries with large deviation
    are dropped first, in RoCo's eviction order (least mean attention first), then the oldest tokens of the window, then
    the last sinks. The newest token stays.

    Attributes:
        b_std: Fraction of `b` for the entries with the largest deviation; None means 0.1, or 0.3 at decode.
        window: Number of protected last tokens.
        sinks: Number of protected first tokens, except at decode.
        group: Reduction over the query heads of a KV head: `mean`, `max` or `sum`.
    """

    name: ClassVar[str] = "roco"
    searched: ClassVar[Mapping[str, Range]] = {"window": Range(0, 64), "sinks": Range(0, 16)}
    nonnegative: ClassVar[bool] = True
    b_std: float | None = None
    window: int = 10
    sinks: int = 4
    group: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.b_std is not None:
            check_share("b_std", self.b_std)
        check_count("window", self.window, 0)
        check_count("sinks", self.sinks, 0)

    @property
    def version(self) -> int:
        """2 with two or more sinks: the last sink is now dropped first if the sinks do not fit."""
        return 2 if self.sinks > 1 else 1

    @property
    def needs(self) -> frozenset[Need]:
        """Accumulated attention per entry, and the sum of its squares."""
        return frozenset({AttentionMass(), AttentionMass(power=2)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        mean_attention, deviation = self._moments(v)
        is_decoding = v.moment == "decode"
        varied_share = self.b_std if self.b_std is not None else _DECODE if is_decoding else _PREFILL
        ranks = rank_entries(Scores(deviation, protect_nothing(v)), v.valid)
        varied_mask = (ranks < portion(v.budget, varied_share)[:, None, None]) & v.valid
        protection = torch.maximum(varied_mask.to(torch.int8) * Scores.CHOSEN, protect_window(v, self.window))
        if not is_decoding:
            protection = torch.maximum(protection, protect_sinks(v, self.sinks))
        return Scores(mean_attention, protection)

    def _moments(self, view: View) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the received attention, float32 `[B, H, n]` each."""
        query_counts = (view.age + 1).clamp(min=1).repeat_interleave(view.model.group, 1)
        # float64, because the variance is the difference of two nearly equal numbers.
        mean_attention = view.obs[AttentionMass()].double() / query_counts
        variance = view.obs[AttentionMass(power=2)].double() / query_counts - mean_attention.square()
        deviation = variance.clamp(min=0.0).sqrt()
        return self._per_head(view, mean_attention), self._per_head(view, deviation)

    def _per_head(self, view: View, per_query_head: Tensor) -> Tensor:
        return view.grouped(per_query_head, self.group).float().masked_fill(~view.valid, 0.0)


ROCO = Policy(
    name="roco",
    score=MeanAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the largest mean attention per query; protects the entries with the most variable attention",
    paper="arXiv 2402.06262",
    moments=("context", "question", "decode"),
    cost="time O(H_q T^2 d) for two passes of column sums, memory O(H_q T)",
)
