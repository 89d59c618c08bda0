"""CriticalKV: two-stage selection that bounds the perturbation of the attention output.

Feng, Lv, Guo, Cao, Zhou, Xie: CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation Perspective, arXiv
2502.03805, Algorithm 1 and Theorem 3.5. alpha = 0.5 as in all of the paper's experiments (the algorithm's header says
0.25 by mistake), epsilon = 1e-4 (footnote 3). `critical_snapkv` is the same selection on SnapKV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import best, order_key, portion
from kvbench.plugin import Policy, Range, Scores, Selector, View
from kvbench_policies.adakv import HeadAdaptive
from kvbench_policies.kernels.value_norm.op import value_norm
from kvbench_policies.ranges import check_finite, check_share
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class TwoStage(Selector):
    """Algorithm 1: stage 1 selects by attention, stage 2 by attention times the norm of the projected value.

    A head's budget `n` includes its window of `w` protected entries. Stage 1 keeps the window and the top
    `max(0, floor(first_stage * n) - w)` others by attention `A`. Stage 2 fills the rest with the largest
    `(A_i + eps) * ||V_i W_O||`. Per-head budgets are allocated before, from attention alone. Ties go to the more recent
    token.

    The algorithm assumes attention, which is never negative. If a head has negative scores (`knorm`, `recency`, ...),
    they are shifted so that the smallest is 0; otherwise the product would rank entries with a large value norm last.
    Only `variant=release` multiplies negative scores unshifted, as kvpress does.

    Attributes:
        first_stage: Fraction of a head's budget that stage 1 selects, the paper's alpha.
        eps: Added to attention, so that the norm ranks entries without attention.
        norm: `l1`, or `l2` (appendix).
        variant: `paper`, or `release` (the authors' and kvpress' code): the head's best `floor(safeguard * b)` entries
            are in stage 1 as well, so a head at its minimum has no stage 2 (`b` is the layer's mean per-head budget);
            negative scores are not shifted.
        safeguard: The allocator's safeguard; only `variant=release` reads it.
    """

    name: ClassVar[str] = "two_stage"
    searched: ClassVar[Mapping[str, Range]] = {"first_stage": Range(0.0, 1.0), "safeguard": Range(0.0, 1.0)}
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
        """2 for `variant=release`: version 1 shifted negative scores."""
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
    summary="AdaKV; the second half of every head's budget is selected by attention times ||V W_O||",
    paper="arXiv 2502.03805, Algorithm 1, on AdaKV",
    cost="time O(H_q T d (w + d_model)), memory O(H_q w T + H T d)",
)
