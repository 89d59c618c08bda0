"""What a reader is shown: the queries of one sequence, and the blocks that they can read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench.view.model import ModelInfo


@dataclass(frozen=True)
class Blocks:
    """One layer of one sequence: new queries, and the complete blocks of its cache.

    Block `k` holds the entries at positions `k * size` to `(k + 1) * size - 1` of every KV head.
    Nothing is ever evicted from a cache that a reader reads, so that the blocks never change.

    Attributes:
        layer: Index among the full-attention layers.
        query: New queries after RoPE, `[H, G, n, d]`, by KV head.
        query_position: Their positions, int64 `[n]`.
        key: Keys after RoPE, `[H, K, size, d]`.
        position: Positions of the entries, int64 `[K, size]`.
        model: The model's shapes, and its rotary embedding.
    """

    layer: int
    query: Tensor
    query_position: Tensor
    key: Tensor
    position: Tensor
    model: ModelInfo
