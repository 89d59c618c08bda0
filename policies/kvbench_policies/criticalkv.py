"""CriticalKV: two-stage selection that bounds the perturbation of the attention output.

Feng, Lv, Guo, Cao, Zhou, Xie: CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation
Perspective, arXiv 2502.03805, Algorithm 1 and Theorem 3.5. alpha = 0.5 as in all of the paper's
experiments (the 0.25 in the algorithm's header is a slip), epsilon = 1e-4 (footnote 3). The same
selection on SnapKV is `critical_snapkv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import best, order_key, portion
from kvbench.plugin import Policy, Scores, Selector, View
from kvbench_policies.adakv import HeadAdaptive
from kvbench_policies.kernels.value_norm.op import value_norm
from kvbench_policies.ranges import check_finite, check_share
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class TwoStage(Selector):
    """Algorithm 1. Stage 1 selects by attention, stage 2 by attention times the value's norm.

    A head's share `n` includes its window, the `w` protected entries. Stage 1 keeps the window and
    the top `max(0, floor(first_stage * n) - w)` others by attention `A`. Stage 2 fills the rest
    with the largest `(A_i + eps) * ||V_i W_O||`. Shares are settled before, from attention alone.
    Ties go to the more recent token.

    The algorithm is about attention, which is never negative. A head whose scores go below zero
    (`knorm`, `recency`, ...) has them shifted so that its smallest is 0: unshifted, the product
    would rank entries of large value norm last, the opposite of what stage 2 is for. Only
    `variant=release` multiplies negative scores as they are, as kvpress does.

    Attributes:
        first_stage: Share of a head's entries that stage 1 keeps, the paper's alpha.
        eps: Added to attention so that the norm decides among entries without attention.
        norm: `l1`, or `l2` (appendix).
        variant: `paper`, or `release` (the authors' and kvpress' code): the head's best
            `floor(safeguard * b)` entries are in stage 1 as well, so a head at its floor has no
            stage 2 (`b` is the layer's mean share); negative scores are not shifted.
        safeguard: The allocator's safeguard; only `variant=release` reads it.
    """

    name: ClassVar[str] = "two_stage"
    first_stage: float = 0.5
    eps: float = 1e-4
    norm: Literal["l1", "l2"] = "l1"
    variant: Literal["paper", "release"] = "paper"
    safeguard: float = 0.2

    def __post_init__(self) -> None:
        check_share("first_stage", self.first_stage)
        check_share("safeguard", self.safeguard)
        check_finite("eps", self.eps, 0)

    @property
    def version(self) -> int:
        """2 for `variant=release`, which shifted negative scores."""
        return 2 if self.variant == "release" else 1

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Select exactly `share` (int64 `[B, H]`) entries per head, bool `[B, H, n]`."""
        first_counts = portion(share, self.first_stage)
        if self.variant == "release":
            mean_floor = portion(share.sum(-1), self.safeguard, share.shape[-1])
            first_counts = torch.maximum(first_counts, mean_floor[:, None])
        window_counts = (v.valid & (scores.protect > 0)).sum(-1)
        first_counts = torch.minimum(torch.maximum(first_counts, window_counts), share)
        first_selected = best(order_key(v, scores), first_counts, unique=True)
        attention = scores.value.float()
        if self.variant == "paper":
            valid_attention = attention.masked_fill(~v.valid, 0.0)
            attention = attention - valid_attention.amin(-1, keepdim=True).clamp(max=0.0)
        value_norms = v.once(
            ("value_norm", self.norm),
            lambda view: value_norm(view.value, view.model.output_weight(view.layer), self.norm),
        )
        output_scores = (attention + self.eps) * value_norms
        stage_scores = Scores(output_scores, first_selected.to(torch.int8))
        return best(order_key(v, stage_scores), share, unique=True)


CRITICALKV = Policy(
    name="criticalkv",
    score=WindowAttention(),
    allocate=HeadAdaptive(),
    select=TwoStage(),
    summary="AdaKV; the second half of every head's share is chosen by attention times ||V W_O||",
    paper="arXiv 2502.03805, Algorithm 1, on AdaKV",
    cost="time O(H_q T d (w + d_model)), memory O(H_q w T + H T d)",
)
