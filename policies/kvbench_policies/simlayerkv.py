"""SimLayerKV: lazy layers, which attend mostly to first and recent tokens, keep only those.

Zhang, Du, Du, Pang, Gao, Lin: SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction, arXiv 2410.13846: 4
first and 1024 recent tokens, and the last 32 queries of the prefill. In the paper, a layer is lazy if the attention to
these tokens exceeds a threshold per model; here the budget determines the number of lazy layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, apportion
from kvbench.plugin import Allocator, Need, Policy, Queries, Range, Scored, View
from kvbench_policies.duo_attention import fill_by_rank, warn_of_full_floor
from kvbench_policies.layer_shares import held_before, measured
from kvbench_policies.local import Recency
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class LazyLayers(Allocator):
    """First and recent tokens for every layer; the least lazy layers keep the whole context.

    Laziness is the attention of a layer's last `window` queries, averaged over queries and query heads, to the first
    `sinks` and the last `recent` tokens. Each head first gets `s = min(sinks + recent, b, T)` entries. Layers are then
    filled up to the `T` tokens of the context, the least lazy first (ties go to the lower layer), until `N` is used up;
    the last layer is filled in part, evenly over its heads. If `sinks + recent` exceeds `b`, all layers get the same
    budget and none keeps everything; a warning is shown once.

    Laziness is measured during the prefill: at moment `decode`, a cache that was compressed before keeps its per-head
    budgets.

    Attributes:
        sinks: Number of first tokens that a lazy layer keeps; also a parameter of the score.
        recent: Number of recent tokens that a lazy layer keeps.
        window: Number of observing queries, in tokens.
    """

    name: ClassVar[str] = "lazy_layers"
    searched: ClassVar[Mapping[str, Range]] = {
        "sinks": Range(0, 16),
        "recent": Range(64, 2048, log=True),
        "window": Range(2, 128, log=True),
    }
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    sinks: int = 4
    recent: int = 1024
    window: int = 32

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1)
        check_count("window", self.window, 1)

    def reserved(self, length: int) -> int:
        """Return the number of sinks and recent tokens."""
        return self.sinks + self.recent

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Distribute a total (int64 `[B]`) over the heads of all layers, int64 `[B, L, H]`."""
        view = layers[0].view
        floors = view.budget.clamp(max=self.sinks + self.recent)
        if bool(((floors == view.budget) & (view.budget < view.length)).any()):
            warn_of_full_floor(self.sinks, self.recent, "simlayerkv (allocate=lazy_layers)", "layer")
        entry_counts = torch.stack([layer.view.valid.sum(-1) for layer in layers], 1)
        reserved_counts = torch.minimum(floors[:, None, None], entry_counts).sum(-1)
        laziness = measured(layers, self, self.laziness)
        layer_shares = fill_by_rank(-laziness, total, reserved_counts, entry_counts.sum(-1))
        head_capacity = entry_counts.flatten(0, 1)
        head_shares = apportion(torch.ones_like(head_capacity).double(), layer_shares.flatten(), head_capacity).view(
            entry_counts.shape
        )
        previous_counts, stay_mask = held_before(layers, total)
        stable_shares = apportion(previous_counts.flatten(1), total, entry_counts.flatten(1)).view(entry_counts.shape)
        return torch.where(stay_mask[:, None, None], stable_shares, head_shares)

    def laziness(self, view: View) -> Tensor:
        """Return the fraction of one layer's attention on first and recent tokens, float64 `[B]`."""
        near_mask = view.valid & ((view.position < self.sinks) | (view.age < self.recent))
        near_mask = near_mask.repeat_interleave(view.model.group, 1)
        attention = view.window_attention_sum(self.window).double().masked_fill(~near_mask, 0.0)
        query_counts = view.length.clamp(max=self.window) * view.model.query_heads
        return attention.sum((1, 2)) / query_counts


SIMLAYERKV = Policy(
    name="simlayerkv",
    score=Recency(sinks=4),
    allocate=LazyLayers(),
    select=TopK(),
    summary="lazy layers keep 4 sinks and 1024 recent tokens, the others everything",
    paper="arXiv 2410.13846",
    moments=("context", "question", "decode"),
    cost="time O(H_q w T d), memory O(H_q w T + H T d); all layers are held until the prefill ends",
)
