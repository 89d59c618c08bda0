"""CaM: values of evicted tokens are added to kept tokens that follow shortly after.

Zhang, Du, Luo, Zhong, Zhang, Liu, Ji: CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024, on H2O's
eviction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import AttentionMass, Merger, Need, Policy, Range, View
from kvbench_policies import merging
from kvbench_policies.h2o import AccumulatedAttention
from kvbench_policies.merging import sum_before
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class ValueMerge(Merger):
    """Each evicted value, divided by `merge_span`, is added to the kept values shortly after it.

    The receivers are the kept tokens among the next `merge_span` positions, as in the authors' code, not the next kept
    tokens at any distance, which would collect many values each in a one-shot eviction. The parts for evicted tokens of
    the span are lost. Keys do not change.

    An evicted token `i` is merged with probability `min(1, a_i / mean a)`, where `a` is the accumulated attention (mean
    over the query heads of a KV head) and the mean is over the next `merge_span` tokens, kept or not, or fewer near the
    end of the sequence. One draw decides for all receivers; it is the view's noise at the evicted token, so it is the
    same in every batch and for every budget. The authors' code evicts one token per step, just before a recent window;
    there `a` is the attention of the newest token alone, and the mean is over that whole window.

    The first eviction step may merge any evicted token. Later ones merge only tokens added since the previous step that
    evicted anything from the layer.

    Attributes:
        merge_span: The paper's m, in tokens.
    """

    name: ClassVar[str] = "value"
    searched: ClassVar[Mapping[str, Range]] = {"merge_span": Range(4, 128, log=True)}
    version = 2  # version 1 merged into the next kept tokens at any distance
    merge_span: int = 32

    def __post_init__(self) -> None:
        check_count("merge_span", self.merge_span, 1)

    @property
    def needs(self) -> frozenset[Need]:
        """Accumulated attention per entry."""
        return frozenset({AttentionMass()})

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys (unchanged) and values to store, `[B, H, n, d]` each.

        The state is `seen`, int64 `[B]`: the sequence length at the previous eviction step; 0 before the first.
        """
        evicted = v.valid & ~keep
        seen_length = state.get("seen", torch.zeros_like(v.length))
        state["seen"] = torch.where(evicted.any(2).any(1), v.length, seen_length)
        # None of the newer tokens was evicted before, so from a candidate on, adjacent entries are adjacent tokens.
        candidates = evicted & (v.position >= seen_length[:, None, None])
        accumulated = v.grouped(v.obs[AttentionMass()]).double().masked_fill(~v.valid, 0.0)
        following_sum, following_count = (self._after(quantity) for quantity in (accumulated, v.valid.double()))
        merged_mask = candidates & (v.noise(1).double() * following_sum < accumulated * following_count)
        receives = keep & (sum_before(merged_mask.double(), self.merge_span) > 0)
        if not bool(receives.any()):
            return v.key, v.value
        return v.key, self._add(v.value, merged_mask, receives)

    def _after(self, quantity: Tensor) -> Tensor:
        """Sum over the `merge_span` entries that follow each entry, `[B, H, n]`."""
        return sum_before(quantity.flip(2), self.merge_span).flip(2)

    def _add(self, values: Tensor, merged_mask: Tensor, receives: Tensor) -> Tensor:
        """Add merged values to their receivers in float32, one block of entries at a time.

        Args:
            values: `[B, H, n, d]`; not changed.
            merged_mask: Entries that are merged, bool `[B, H, n]`.
            receives: Entries that receive anything, bool `[B, H, n]`.
        """
        updated = values.clone()
        batch_size, head_count, entry_count, head_dim = values.shape
        block_size = max(self.merge_span, merging.BLOCK // (batch_size * head_count * head_dim))
        for block_start in range(0, entry_count, block_size):
            block_slice = slice(block_start, block_start + block_size)
            block_length = merged_mask[:, :, block_slice].shape[2]
            reach_slice = slice(max(0, block_start - self.merge_span), block_start + block_size)
            evicted_values = values[:, :, reach_slice].float().masked_fill(~merged_mask[:, :, reach_slice, None], 0.0)
            additions = sum_before(evicted_values, self.merge_span)[:, :, -block_length:] / self.merge_span
            merged_values = (values[:, :, block_slice].float() + additions).to(values.dtype)
            updated[:, :, block_slice] = torch.where(
                receives[:, :, block_slice, None], merged_values, values[:, :, block_slice]
            )
        return updated


CAM = Policy(
    name="cam",
    score=AccumulatedAttention(),
    allocate=Uniform(),
    select=TopK(),
    merge=ValueMerge(),
    summary="H2O; a random part of the evicted values, divided by 32, is added to the next 32 tokens if kept",
    paper="CaM, ICML 2024",
    moments=("context", "question", "decode"),
    cost="time O(n d log m), memory O(n d)",
)
