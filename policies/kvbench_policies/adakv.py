"""AdaKV: the heads of a layer share its budget according to where the large attention weights are.

Feng, Lv, Cao, Xie, Zhou: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for
Efficient LLM Inference, arXiv 2407.11550, Algorithms 1 and 2 (safeguard alpha = 0.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, best, order_key, portion
from kvbench.plugin import Allocator, Policy, Scored, Scores
from kvbench_policies.ranges import check_share
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class HeadAdaptive(Allocator):
    """The largest scores of a layer over all its heads, each head with a floor.

    `b` is the layer's mean number of entries per head. Protected entries count as the largest.

    Attributes:
        safeguard: AdaKV's alpha: every head gets at least `floor(alpha * b)` entries.
        safeguard_mode: `reserve`: every head first keeps its own best `floor(alpha * b)`, and the
            rest goes to the best remaining entries of the layer (kvpress and CriticalKV's code).
            `mix`: with `w` protected entries per head and `b' = b - w`, the counts `c_h` of one
            joint top-`H * b'` are mixed with an even split,
            `n_h = (1 - alpha) c_h + floor(alpha b') + w`, rounded by largest remainder (AdaKV's own
            repository).
    """

    name: ClassVar[str] = "head_adaptive"
    scope: ClassVar[Literal["head", "layer", "model"]] = "layer"
    safeguard: float = 0.2
    safeguard_mode: Literal["reserve", "mix"] = "reserve"

    def __post_init__(self) -> None:
        """Check the range."""
        check_share("safeguard", self.safeguard)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Spread a layer's total (int64 `[B]`) over its heads, int64 `[B, 1, H]`."""
        (layer,) = layers
        spread = self._mix if self.safeguard_mode == "mix" else self._reserve
        return spread(layer, total)[:, None]

    def _reserve(self, layer: Scored, total: Tensor) -> Tensor:
        v, scores = layer
        floor = portion(total, self.safeguard, v.model.kv_heads)
        key = order_key(v, scores)
        safe = best(key, torch.minimum(floor[:, None], v.valid.sum(-1)), unique=True)
        others = key.masked_fill(safe, -1).flatten(1)
        chosen = best(others, total - safe.sum((1, 2))).view(v.shape)
        return (safe | chosen).sum(-1)

    def _mix(self, layer: Scored, total: Tensor) -> Tensor:
        v, scores = layer
        heads = v.model.kv_heads
        joint = best(order_key(v, scores).flatten(1), total).view(v.shape).sum(-1)
        window = (v.valid & (scores.protect > Scores.CHOSEN)).sum(-1)
        free = (total - window.sum(-1)).clamp(min=0)
        alpha = Fraction(str(self.safeguard)).limit_denominator(1_000_000)
        even = portion(free, self.safeguard, heads)[:, None] + window
        real = (alpha.denominator - alpha.numerator) * (joint - window) + alpha.denominator * even
        mixed = _largest_remainder(real, alpha.denominator, total, v.valid.sum(-1))
        # If the protected entries fill the layer there is nothing to mix.
        return torch.where((free > 0)[:, None], mixed, joint)


def _largest_remainder(real: Tensor, unit: int, total: Tensor, most: Tensor) -> Tensor:
    """Round shares `real / unit` `[B, H]` to integers that sum to `total`, none above `most`."""
    shares = torch.minimum(real // unit, most)
    order = (real % unit).argsort(dim=-1, descending=True, stable=True)
    for _ in range(2):  # flooring a head and the even part leaves fewer than two entries per head
        left = (total - shares.sum(-1))[:, None]
        room = (shares < most).gather(-1, order)
        given = (room & (room.cumsum(-1) <= left)).long()
        shares = shares.scatter_add(-1, order, given)
    left = (total - shares.sum(-1))[:, None]
    room = most - shares
    return shares + torch.minimum(room, (left - (room.cumsum(-1) - room)).clamp(min=0))


ADAKV = Policy(
    name="adakv",
    score=WindowAttention(),
    allocate=HeadAdaptive(),
    select=TopK(),
    summary="SnapKV's scores; heads share a layer's budget, each with a floor of 20% of the mean",
    paper="arXiv 2407.11550, Algorithms 1 and 2",
    cost="time O(H_q w T d), memory O(H_q w T + H T d)",
)
