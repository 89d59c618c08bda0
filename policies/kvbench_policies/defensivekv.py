"""DefensiveKV: the maximum instead of the mean attention of a token, and a two-stage selection.

Feng, Guo, Lv, Zhou, Xie: Taming the Fragility of KV Cache Eviction in LLM Inference, arXiv 2510.13334. Attention is
aggregated by its maximum over queries and heads, with a floor, so that averaging does not hide a token that mattered
once. `layer_defensivekv` also distributes the budget over layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import best, order_key, rank_entries
from kvbench.plugin import Need, Policy, Queries, Range, Scores, Selector, View, protect_nothing, protect_window
from kvbench_policies.adakv import HeadAdaptive
from kvbench_policies.joint import Global
from kvbench_policies.kernels.value_norm.op import value_norm
from kvbench_policies.ranges import check_count, check_share
from kvbench_policies.windows import WindowScore

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Defensive(WindowScore):
    """Maximum attention of a token, floored at the mean, times its fraction of the value norms.

        m_i = max_{g in group, q in window} pooled( A_g[q, .] )_i        for i < T - window
        s_i = max(m_i, mean_i m_i) * n_{h,i} / sum_h n_{h,i},    n = mean_g || V_{h,i} W_O^(g) ||_1

    Every row `A_g[q, .]` is restricted to the past, average-pooled with zero padding and rescaled to its original sum.
    The window is protected. The sum over KV heads is per token; earlier eviction steps may have removed the token from
    some heads (see `share_of_heads`).

    Attributes:
        window: Number of observing queries, in tokens.
        kernel: Odd width of the pooling, in entries; 1 disables pooling.
    """

    name: ClassVar[str] = "defensive"
    nonnegative: ClassVar[bool] = True
    kernel: int = 5

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the window."""
        before_window = self.past(v)
        attention = v.window_attention(self.window).unflatten(1, (-1, v.model.group))
        attention = attention.masked_fill(~before_window[:, :, None, None], 0.0)
        largest_attention = self._pool(attention, before_window).amax((2, 3))
        past_counts = before_window.sum(-1, keepdim=True).clamp(min=1)
        floored_attention = torch.maximum(largest_attention, largest_attention.sum(-1, keepdim=True) / past_counts)
        value_norms = value_norm(v.value, v.model.output_weight(v.layer))
        scores = floored_attention * share_of_heads(v, value_norms)
        return Scores(scores.masked_fill(~before_window, 0.0), protect_window(v, self.window))

    def _pool(self, attention: Tensor, before_window: Tensor) -> Tensor:
        """Pool rows `[B, H, G, window, n]` over neighbours, preserving the sum of each row."""
        pooled = self.pooled(attention.flatten(1, 3), "avg").view(attention.shape)
        pooled = pooled.masked_fill(~before_window[:, :, None, None], 0.0)
        rescaling = attention.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp(min=_TINY)
        return pooled * rescaling


def share_of_heads(view: View, norms: Tensor) -> Tensor:
    """Divide every entry's norm by the sum over the KV heads that hold the same token.

    If only `k` of the `H` heads hold the token, the sum is multiplied by `H / k`.

    Args:
        view: View of the layer.
        norms: Non-negative, `[B, H, n]`.

    Returns:
        float32 `[B, H, n]`.
    """
    head_count = view.shape[1]
    positions = view.position.masked_fill(~view.valid, -1).flatten(1)
    positions, sort_order = positions.sort(dim=-1)
    run_starts = torch.zeros_like(positions)
    run_starts[:, 1:] = positions[:, 1:] != positions[:, :-1]
    run_indices = torch.empty_like(sort_order).scatter_(-1, sort_order, run_starts.cumsum(-1))
    flat_norms = norms.double().flatten(1)
    run_sums = torch.zeros_like(flat_norms).scatter_add_(-1, run_indices, flat_norms).gather(-1, run_indices)
    run_counts = (
        torch.zeros_like(flat_norms).scatter_add_(-1, run_indices, torch.ones_like(flat_norms)).gather(-1, run_indices)
    )
    return (flat_norms * run_counts / (run_sums * head_count).clamp(min=_TINY)).float().view(view.shape)


@dataclass(frozen=True)
class ByMass(Selector):
    """Two stages: the entries that receive most of the window's attention, then the largest scores.

    Stage 1 sorts the unprotected entries of each head (the past) by their plain window attention: the mean over the
    group and the window, not pooled, renormalised over the past. It protects the longest prefix whose accumulated
    attention stays below `mass` minus the fraction that the protected entries (the window) receive, at most `b` minus
    their number (`b` is the mean over all layers). Stage 1 runs before the budget is allocated; if an allocator gives a
    head less, its least attended entries are dropped first. Stage 2 takes the largest scores. Stage 1 does not read the
    scores, so any score works, including negative ones. Ties go to the more recent token.

    Attributes:
        mass: Fraction of the window's attention that stage 1 may protect.
        variant: `paper`, or `release` (the authors' code): the window's fraction of attention is read from the `window`
            tokens before the window, as one number per layer. For a head with `n` entries, `w` of them protected, stage
            1 has at most `k = (n - w) b / n - w` entries, rounded towards 0, because the code applies the kept fraction
            to a length without the window. If `k` is negative (the budget hardly exceeds the window), the code uses it
            as a slice end, so stage 1 is everything but the `-k` least attended entries. The code gives all of them the
            window's score, so more entries tie than fit; here the window and then the most attended ones stay. With
            `allocate=global`, that score is the largest of each layer, so in the code they can lose to entries of
            another layer; here they cannot.
        window: Number of observing queries, in tokens.
    """

    name: ClassVar[str] = "mass"
    searched: ClassVar[Mapping[str, Range]] = {"mass": Range(0.1, 0.99), "window": Range(2, 128, log=True)}
    mass: float = 0.9
    variant: Literal["paper", "release"] = "paper"
    window: int = 32

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_share("mass", self.mass)

    @property
    def version(self) -> int:
        """2 for `variant=release`: version 1 had a longer first stage."""
        return 2 if self.variant == "release" else 1

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def prepare(self, v: View, scores: Scores) -> Scores:
        """Protect stage 1; attention becomes the value of its entries, so the weakest is evicted first."""
        protected_entries = v.valid & (scores.protect > 0)
        protected_counts = protected_entries.sum(-1)
        unprotected = v.valid & ~protected_entries
        attention = v.grouped(v.window_attention_sum(self.window))
        attention = attention / v.length.clamp(max=self.window)[:, None, None]
        if self.variant == "release":
            slipped_mask = v.valid & (v.age >= self.window) & (v.age < 2 * self.window)
            window_share = attention.masked_fill(~slipped_mask, 0.0).sum(-1).mean(-1, keepdim=True)
        else:
            window_share = attention.masked_fill(~protected_entries, 0.0).sum(-1)
        attention = attention.masked_fill(~unprotected, 0.0)
        attention = attention / attention.sum(-1, keepdim=True).clamp(min=_TINY)
        ranks = rank_entries(Scores(attention, protect_nothing(v)), unprotected)
        ordered = torch.empty_like(attention).scatter_(-1, ranks, attention)
        below_mass = ordered.double().cumsum(-1) < (self.mass - window_share)[..., None]
        limits = v.budget[:, None].expand_as(protected_counts)
        if self.variant == "release":
            entry_counts = v.valid.sum(-1)
            # (n - w) b / n - w as one fraction, so that rounding towards 0 happens once
            numerator = (entry_counts - protected_counts) * limits - protected_counts * entry_counts
            max_counts = torch.div(numerator, entry_counts.clamp(min=1), rounding_mode="trunc")
            sliced_counts = (unprotected.sum(-1) + max_counts).clamp(min=0)
            first_counts = torch.where(max_counts < 0, sliced_counts, torch.minimum(below_mass.sum(-1), max_counts))
        else:
            first_counts = torch.minimum(below_mass.sum(-1), limits - protected_counts)
        first_mask = unprotected & (ranks < first_counts[..., None])
        classes = torch.where(first_mask, Scores.CHOSEN, scores.protect)
        return Scores(torch.where(first_mask, attention, scores.value), classes.to(torch.int8))

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Select exactly `share` (int64 `[B, H]`) entries per head, bool `[B, H, n]`."""
        return best(order_key(v, scores), share)


_COST = "time O(w T d + H_q T d d_model), memory O(H_q w T)"

DEFENSIVEKV = Policy(
    name="defensivekv",
    score=Defensive(),
    allocate=HeadAdaptive(safeguard=0.0),
    select=ByMass(),
    summary="maximum instead of mean attention, with a floor; one top-k over the heads of a layer",
    paper="arXiv 2510.13334, DefensiveKV",
    cost=_COST,
)

LAYER_DEFENSIVEKV = Policy(
    name="layer_defensivekv",
    score=Defensive(),
    allocate=Global(),
    select=ByMass(),
    summary="defensivekv with one top-k over all heads of all layers",
    paper="arXiv 2510.13334, Layer-DefensiveKV",
    cost=_COST,
)
