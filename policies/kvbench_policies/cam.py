"""CaM: the values of evicted tokens are spread over the kept tokens behind them.

Zhang, Du, Luo, Zhong, Zhang, Liu, Ji: CaM: Cache Merging for Memory-efficient LLMs Inference,
ICML 2024, on H2O's eviction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import AttentionMass, Merger, Need, Policy, View
from kvbench_policies.h2o import AccumulatedAttention
from kvbench_policies.merging import pack, put, sum_rows_into, take, window_sum


@dataclass(frozen=True)
class ValueMerge(Merger):
    """An evicted value is added, divided by `merge_span`, to the values of the next kept tokens.

    An evicted token `i` is merged with probability `min(1, a_i / mean a)`, `a` the attention that
    was accumulated (mean over the query heads of a KV head) and its mean that of the next
    `merge_span` kept tokens behind `i`; one draw decides for all of them. Where fewer are left
    behind it those take part, each still gets the `merge_span`-th part, and what the missing ones
    would have got is lost; with none behind it, the token is dropped. Keys stay as they are.

    The first cut of a cache merges all that it evicts. Later ones merge only the tokens that came
    since the cut before (one that evicts nothing from the layer does not count). Kept values are
    sums, so the order of the evicted does not matter.

    Draws are the view's noise at the evicted token: the same in every batch and for every budget.

    Attributes:
        merge_span: The paper's m, in tokens.
    """

    name: ClassVar[str] = "value"
    merge_span: int = 32

    def __post_init__(self) -> None:
        """Check the range."""
        if self.merge_span < 1:
            raise UserError(
                f"merge_span={self.merge_span}: a number of tokens, 1 or more, would be right"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """The attention that every entry received."""
        return frozenset({AttentionMass()})

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Give the keys and values to store, `[B, H, n, d]` each; the keys are the view's own.

        The state is `seen`, int64 `[B]`: tokens that the sequence had seen at the cut before, 0
        before the first.
        """
        gone = v.valid & ~keep
        seen = state.get("seen", torch.zeros_like(v.length))
        state["seen"] = torch.where(gone.any(2).any(1), v.length, seen)
        gone = gone & (v.position >= seen[:, None, None])
        kept, there = pack(keep)
        if kept.shape[2] == 0:
            return v.key, v.value
        mass = v.grouped(v.obs[AttentionMass()]).double()
        first = keep.cumsum(-1)  # of an evicted token: place of the next kept one
        gone = gone & (first < keep.sum(-1, keepdim=True))
        ahead = (mass.gather(2, kept).masked_fill(~there, 0.0), there.double())
        total, count = (window_sum(x.flip(2), self.merge_span).flip(2) for x in ahead)
        slot = first.clamp(max=kept.shape[2] - 1)
        mean = (total / count.clamp(min=1)).gather(2, slot)
        go = gone & (v.noise(1).double() * mean < mass)
        if not bool(go.any()):
            return v.key, v.value
        entry = torch.arange(v.shape[2], device=keep.device).expand(v.shape)
        sums = sum_rows_into(v.value, entry, go, slot, kept.shape[2])
        rows = take(v.value, kept) + window_sum(sums, self.merge_span) / self.merge_span
        return v.key, put(v.value, kept, there, rows)


CAM = Policy(
    name="cam",
    score=AccumulatedAttention(),
    allocate=Uniform(),
    select=TopK(),
    merge=ValueMerge(),
    summary="H2O whose evicted values are added, thinned, to those of the kept tokens behind them",
    paper="CaM, ICML 2024",
    moments=("context", "question", "decode"),
    cost="time O(n d log m), memory O(n d)",
)
