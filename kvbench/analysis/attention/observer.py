"""Attention of a prompt as a map per layer, computed in blocks of queries during the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.engine.observers import LayerObserver
from kvbench.plugin import ModelInfo, Need, Observer

_BLOCK = 1 << 22
"""Attention weights computed per block."""


@dataclass(frozen=True)
class AttentionMap(Need):
    """Attention averaged over query heads and over the tokens of a bin, float32 `[bins, bins]`, queries down.

    A number is the mean weight of one query on one of its visible keys in the bin; NaN where nothing is visible.

    Attributes:
        bins: Most rows and columns.
    """

    bins: int

    def observer(self, model: ModelInfo) -> Observer:
        """Return a new observer."""
        return AttentionMapObserver(self.bins)


class AttentionMapObserver(LayerObserver):
    """Observer of `AttentionMap`, for one sequence that is prefilled in one forward.

    Args:
        bins: As in `AttentionMap`.
    """

    def __init__(self, bins: int) -> None:
        self.bins = bins
        self._held: dict[int, Tensor] = {}

    @torch.no_grad()
    def update(self, layer: int, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, valid: Tensor, scale: float) -> None:
        """Observe one forward pass of one layer (see `kvbench.plugin.Observer`)."""
        batch_size, heads, length, _ = q.shape
        if batch_size != 1 or k.shape[2] != length:
            raise ValueError("an attention map is of one sequence, prefilled in one forward")
        bins = min(self.bins, length)
        bin_of = torch.arange(length, device=q.device) * bins // length
        sums, counts = torch.zeros(2, bins, bins, device=q.device, dtype=torch.float64)
        key = k[0].float().transpose(-1, -2)[:, None]
        query = q[0].float().unflatten(0, (k.shape[1], -1))
        block_size = max(1, _BLOCK // (heads * length))
        for start in range(0, length, block_size):
            positions = torch.arange(start, min(start + block_size, length), device=q.device)
            logits = (query[:, :, start : start + block_size] @ key).flatten(0, 1) * scale
            visible = torch.arange(length, device=q.device) <= positions[:, None]
            weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).double().mean(0)
            for totals, addends in ((sums, weights), (counts, visible.double())):
                by_key = torch.zeros(len(positions), bins, device=q.device, dtype=torch.float64)
                by_key.index_add_(1, bin_of, addends)
                totals.index_add_(0, bin_of[positions], by_key)
        self._held[layer] = (sums / counts).float()

    def read(self, layer: int) -> Tensor:
        """Return the map of a layer (see `AttentionMap`)."""
        return self._held[layer]

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Refuse: a map is of one sequence."""
        raise NotImplementedError
