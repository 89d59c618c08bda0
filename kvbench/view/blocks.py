"""Input of a reader: the queries of one sequence and the blocks that they can read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench.view.model import ModelInfo


@dataclass(frozen=True)
class Blocks:
    """One layer of one sequence: new queries and the complete blocks of its cache.

    Block `k` holds the entries at positions `k * size` to `(k + 1) * size - 1` of every KV head. Blocks never change,
    because a cache with a reader evicts nothing.

    Attributes:
        layer: Index among the full-attention layers.
        query: New queries after RoPE, grouped by KV head, `[H, G, n, d]`.
        query_position: Positions of the queries, int64 `[n]`.
        key: Keys after RoPE, `[H, K, size, d]`.
        position: Positions of the entries, int64 `[K, size]`.
        model: Shapes and rotary embedding of the model.
    """

    layer: int
    query: Tensor
    query_position: Tensor
    key: Tensor
    position: Tensor
    model: ModelInfo
