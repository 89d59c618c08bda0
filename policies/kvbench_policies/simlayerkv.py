"""SimLayerKV: lazy layers, which attend to first and recent tokens alone, keep nothing else.

Zhang, Du, Du, Pang, Gao, Lin: SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction,
arXiv 2410.13846: 4 first and 1024 recent tokens, and the last 32 queries of the prefill. The paper
calls a layer lazy where its share of attention is above a threshold per model; here the budget says
how many layers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, apportion
from kvbench.plugin import Allocator, Need, Policy, Queries, Scored, View
from kvbench_policies.duo_attention import fill_by_rank, warn_of_full_floor
from kvbench_policies.layer_shares import held_before, measured
from kvbench_policies.local import Recency
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class LazyLayers(Allocator):
    """First and recent tokens for every layer; the rest goes, whole, to the least lazy layers.

    A layer is the lazier, the more of the attention of its last `window` queries, mean over queries
    and query heads, goes to the first `sinks` and the last `recent` tokens. Each head is first
    given `s = min(sinks + recent, b, T)` entries. Then layers are filled up to the `T` tokens of
    the context, the least lazy first (ties go to the lower layer), until `N` is spent; the last one
    is filled in part, its heads alike. If `sinks + recent` exceeds `b`, all layers get the same
    share and none keeps everything; a warning says so once.

    Laziness belongs to the prefill: at moment `decode` a cache that was cut before keeps the shares
    that its heads have.

    Attributes:
        sinks: Number of first tokens that a lazy layer holds; also a parameter of the score.
        recent: Number of recent tokens that a lazy layer holds.
        window: Number of observing queries, in tokens.
    """

    name: ClassVar[str] = "lazy_layers"
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    sinks: int = 4
    recent: int = 1024
    window: int = 32

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1)
        check_count("window", self.window, 1)

    def reserved(self, length: int) -> int:
        """The sinks and the recent tokens."""
        return self.sinks + self.recent

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Spread a total (int64 `[B]`) over the heads of all layers, int64 `[B, L, H]`."""
        v = layers[0].view
        floor = v.budget.clamp(max=self.sinks + self.recent)
        if bool(((floor == v.budget) & (v.budget < v.length)).any()):
            warn_of_full_floor(
                self.sinks, self.recent, "simlayerkv (allocate=lazy_layers)", "layer"
            )
        held = torch.stack([x.view.valid.sum(-1) for x in layers], 1)
        reserved = torch.minimum(floor[:, None, None], held).sum(-1)
        lazy = measured(layers, self, self.laziness)
        whole = fill_by_rank(-lazy, total, reserved, held.sum(-1))
        heads = held.flatten(0, 1)
        shares = apportion(torch.ones_like(heads).double(), whole.flatten(), heads).view(held.shape)
        before, stay = held_before(layers, total)
        kept = apportion(before.flatten(1), total, held.flatten(1)).view(held.shape)
        return torch.where(stay[:, None, None], kept, shares)

    def laziness(self, v: View) -> Tensor:
        """Share of attention on first and recent tokens in one layer, float64 `[B]`."""
        near = v.valid & ((v.position < self.sinks) | (v.age < self.recent))
        near = near.repeat_interleave(v.model.group, 1)
        attention = v.window_attention(self.window).sum(2).double().masked_fill(~near, 0.0)
        queries = v.length.clamp(max=self.window) * v.model.query_heads
        return attention.sum((1, 2)) / queries


SIMLAYERKV = Policy(
    name="simlayerkv",
    score=Recency(sinks=4),
    allocate=LazyLayers(),
    select=TopK(),
    summary="lazy layers keep 4 sinks and 1024 recent tokens, the others everything",
    paper="arXiv 2410.13846",
    moments=("context", "question", "decode"),
    cost="time O(H_q w T d), memory O(H_q w T + H T d); all layers are held to the end",
)
