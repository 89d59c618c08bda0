"""DefensiveKV: the worst case of a token's importance instead of its mean, two stages by mass.

Feng, Guo, Lv, Zhou, Xie: Taming the Fragility of KV Cache Eviction in LLM Inference,
arXiv 2510.13334. Attention is aggregated by its maximum over queries and heads, with a floor, so
that a token which mattered once is not lost in a mean. `layer_defensivekv` spreads the budget over
layers as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvbench.errors import UserError
from kvbench.parts import best, order_key, rank_entries
from kvbench.plugin import (
    Need,
    Policy,
    Queries,
    Score,
    Scores,
    Selector,
    View,
    protect_nothing,
    protect_window,
)
from kvbench_policies.adakv import HeadAdaptive
from kvbench_policies.joint import Global
from kvbench_policies.kernels.value_norm.op import value_norm

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Defensive(Score):
    """The largest attention that a token got, floored at the mean, times its values' part.

        m_i = max_{g in group, q in window} pooled( A_g[q, .] )_i        for i < T - window
        s_i = max(m_i, mean_i m_i) * n_{h,i} / sum_h n_{h,i},    n = mean_g || V_{h,i} W_O^(g) ||_1

    Every row `A_g[q, .]` is cut to the past, pooled by average (zeros beyond its ends, counted) and
    scaled back to the mass that it had. The window is protected. The sum over KV heads is that of
    one token; after an earlier cut some heads no longer hold it (see `share_of_heads`).

    Attributes:
        window: Queries that observe, in tokens.
        kernel: Width of the pooling in entries, odd; 1 pools nothing.
    """

    name: ClassVar[str] = "defensive"
    nonnegative: ClassVar[bool] = True
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_window(self.window)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"kernel={self.kernel}: an odd number, 1 or more, would be right")

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the window."""
        past = (v.age >= self.window) & v.valid
        rows = v.window_attention(self.window).unflatten(1, (-1, v.model.group))
        rows = rows.masked_fill(~past[:, :, None, None], 0.0)
        largest = self._pool(rows, past).amax((2, 3))
        count = past.sum(-1, keepdim=True).clamp(min=1)
        floored = torch.maximum(largest, largest.sum(-1, keepdim=True) / count)
        size = value_norm(v.value, v.model.output_weight(v.layer))
        value = floored * share_of_heads(v, size)
        return Scores(value.masked_fill(~past, 0.0), protect_window(v, self.window))

    def _pool(self, rows: Tensor, past: Tensor) -> Tensor:
        """Pool rows `[B, H, G, window, n]` over neighbours and keep each one's mass."""
        flat = rows.flatten(1, 3)
        pooled = avg_pool1d(flat, self.kernel, stride=1, padding=self.kernel // 2)
        pooled = pooled.view(rows.shape).masked_fill(~past[:, :, None, None], 0.0)
        mass = rows.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp(min=_TINY)
        return pooled * mass


def share_of_heads(v: View, size: Tensor) -> Tensor:
    """Divide every entry's size by the sum over the KV heads that hold the same token.

    Where only `k` of the `H` heads hold it the sum is taken `H / k` times.

    Args:
        v: The layer.
        size: 0 or more, `[B, H, n]`.

    Returns:
        float32 `[B, H, n]`.
    """
    heads = v.shape[1]
    token = v.position.masked_fill(~v.valid, -1).flatten(1)
    token, order = token.sort(dim=-1)
    changes = torch.zeros_like(token)
    changes[:, 1:] = token[:, 1:] != token[:, :-1]
    run = torch.empty_like(order).scatter_(-1, order, changes.cumsum(-1))
    flat = size.double().flatten(1)
    total = torch.zeros_like(flat).scatter_add_(-1, run, flat).gather(-1, run)
    held = torch.zeros_like(flat).scatter_add_(-1, run, torch.ones_like(flat)).gather(-1, run)
    return (flat * held / (total * heads).clamp(min=_TINY)).float().view(v.shape)


@dataclass(frozen=True)
class ByMass(Selector):
    """Two stages: what holds most of the window's attention, then the largest scores.

    Stage 1, per head: the entries that the score does not protect (the past) by their plain window
    attention (mean over the group and the window, not pooled, renormalised over the past); the
    longest prefix whose mass stays below `mass` less the share of attention that the protected
    entries (the window) hold, at most `b` less their number (`b` is the mean of all layers). It is
    protected before the budget is allocated; where an allocator gives a head less than that, its
    least attended entries go first. Stage 2: the largest of what the score gives, of whatever sign:
    stage 1 looks at attention alone, so that any score will do. Ties go to the more recent token.

    Attributes:
        mass: Share of the window's attention that stage 1 may secure.
        variant: `paper`, or `release` (the authors' code): the window's share is read, one number a
            layer, from the `window` tokens before the window.
        window: Queries that observe, in tokens.
    """

    name: ClassVar[str] = "mass"
    mass: float = 0.9
    variant: Literal["paper", "release"] = "paper"
    window: int = 32

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_window(self.window)
        if not 0 <= self.mass <= 1:
            raise UserError(f"mass={self.mass}: a share of attention in [0, 1] would be right")

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def prepare(self, v: View, scores: Scores) -> Scores:
        """Protect stage 1; the values of its entries become their attention, to give way by."""
        held = v.valid & (scores.protect > 0)
        past = v.valid & ~held
        plain = v.grouped(v.window_attention(self.window).sum(2))
        plain = plain / v.length.clamp(max=self.window)[:, None, None]
        if self.variant == "release":
            slip = v.valid & (v.age >= self.window) & (v.age < 2 * self.window)
            own = plain.masked_fill(~slip, 0.0).sum(-1).mean(-1, keepdim=True)
        else:
            own = plain.masked_fill(~held, 0.0).sum(-1)
        plain = plain.masked_fill(~past, 0.0)
        plain = plain / plain.sum(-1, keepdim=True).clamp(min=_TINY)
        rank = rank_entries(Scores(plain, protect_nothing(v)), past)
        order = torch.empty_like(plain).scatter_(-1, rank, plain)
        below = order.double().cumsum(-1) < (self.mass - own)[..., None]
        first = torch.minimum(below.sum(-1), v.budget[:, None] - held.sum(-1))
        chosen = past & (rank < first[..., None])
        classes = torch.where(chosen, Scores.CHOSEN, scores.protect)
        return Scores(torch.where(chosen, plain, scores.value), classes.to(torch.int8))

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Choose exactly `share` (int64 `[B, H]`) entries per head, bool `[B, H, n]`."""
        return best(order_key(v, scores), share)


def _check_window(window: int) -> None:
    if window < 1:
        raise UserError(f"window={window}: a number of tokens, 1 or more, would be right")


_COST = "time O(w T d + H_q T d d_model), memory O(H_q w T)"

DEFENSIVEKV = Policy(
    name="defensivekv",
    score=Defensive(),
    allocate=HeadAdaptive(safeguard=0.0),
    select=ByMass(),
    summary="largest instead of mean attention, with a floor; one top-k over the heads of a layer",
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
