"""AdaKV: the heads of a layer share its budget in proportion to their large attention weights.

Feng, Lv, Cao, Xie, Zhou: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference, arXiv 2407.11550, Algorithms 1 and 2 (safeguard alpha = 0.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, best, order_key, portion
from kvbench.plugin import Allocator, Policy, Range, Scored, Scores
from kvbench_policies.ranges import check_share
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class HeadAdaptive(Allocator):
    """One top-k per layer over all its heads, with a minimum per head.

    `b` is the layer's mean number of entries per head. Protected entries rank highest.

    Attributes:
        safeguard: AdaKV's alpha: every head gets at least `floor(alpha * b)` entries.
        safeguard_mode: `reserve`: every head first keeps its own best `floor(alpha * b)` entries; the best remaining
            entries of the layer fill the rest (kvpress and CriticalKV's code). `mix`: with `w` protected entries per
            head and `b' = b - w`, the counts `c_h` of one joint top-`H * b'` are mixed with an even split,
            `n_h = (1 - alpha) c_h + floor(alpha b') + w`, rounded by largest remainder (AdaKV's own repository).
    """

    name: ClassVar[str] = "head_adaptive"
    searched: ClassVar[Mapping[str, Range]] = {"safeguard": Range(0.0, 1.0)}
    scope: ClassVar[Literal["head", "layer", "model"]] = "layer"
    safeguard: float = 0.2
    safeguard_mode: Literal["reserve", "mix"] = "reserve"

    def __post_init__(self) -> None:
        check_share("safeguard", self.safeguard)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Distribute a layer's total (int64 `[B]`) over its heads, int64 `[B, 1, H]`."""
        (layer,) = layers
        strategy = self._mix if self.safeguard_mode == "mix" else self._reserve
        return strategy(layer, total)[:, None]

    def _reserve(self, layer: Scored, total_budget: Tensor) -> Tensor:
        view, scores = layer
        head_floor = portion(total_budget, self.safeguard, view.model.kv_heads)
        rank_keys = order_key(view, scores)
        safeguarded = best(rank_keys, torch.minimum(head_floor[:, None], view.valid.sum(-1)), unique=True)
        remaining_keys = rank_keys.masked_fill(safeguarded, -1).flatten(1)
        selected = best(remaining_keys, total_budget - safeguarded.sum((1, 2))).view(view.shape)
        return (safeguarded | selected).sum(-1)

    def _mix(self, layer: Scored, total_budget: Tensor) -> Tensor:
        view, scores = layer
        head_count = view.model.kv_heads
        joint_shares = best(order_key(view, scores).flatten(1), total_budget).view(view.shape).sum(-1)
        window_counts = (view.valid & (scores.protect > Scores.CHOSEN)).sum(-1)
        free_entries = (total_budget - window_counts.sum(-1)).clamp(min=0)
        alpha = Fraction(str(self.safeguard)).limit_denominator(1_000_000)
        even_shares = portion(free_entries, self.safeguard, head_count)[:, None] + window_counts
        exact_shares = (alpha.denominator - alpha.numerator) * (
            joint_shares - window_counts
        ) + alpha.denominator * even_shares
        mixed_shares = _largest_remainder(exact_shares, alpha.denominator, total_budget, view.valid.sum(-1))
        # If the protected entries fill the layer, there is nothing to mix.
        return torch.where((free_entries > 0)[:, None], mixed_shares, joint_shares)


def _largest_remainder(exact_shares: Tensor, denominator: int, total_entries: Tensor, capacity: Tensor) -> Tensor:
    """Round `exact_shares / denominator` `[B, H]` to integers that sum to `total_entries`, within `capacity`."""
    shares = torch.minimum(exact_shares // denominator, capacity)
    by_remainder = (exact_shares % denominator).argsort(dim=-1, descending=True, stable=True)
    for _ in range(2):  # flooring leaves fewer than two entries per head
        remaining = (total_entries - shares.sum(-1))[:, None]
        headroom = (shares < capacity).gather(-1, by_remainder)
        additions = (headroom & (headroom.cumsum(-1) <= remaining)).long()
        shares = shares.scatter_add(-1, by_remainder, additions)
    remaining = (total_entries - shares.sum(-1))[:, None]
    headroom = capacity - shares
    return shares + torch.minimum(headroom, (remaining - (headroom.cumsum(-1) - headroom)).clamp(min=0))


ADAKV = Policy(
    name="adakv",
    score=WindowAttention(),
    allocate=HeadAdaptive(),
    select=TopK(),
    summary="SnapKV's scores; heads share a layer's budget, each with at least 20% of the mean",
    paper="arXiv 2407.11550, Algorithms 1 and 2",
    cost="time O(H_q w T d), memory O(H_q w T + H T d)",
)
