"""The ragged cache: every (sequence, KV head) of a layer keeps its own number of entries.

A full-attention layer is first dense (the prefill, `[B, H, S, d]`) and, once compressed, packed:
one K and one V of rows `[rows, d]` in which segment `s = b * H + h` owns the rows
`start[s] : start[s] + length[s]` and `col[row]` says which logical column a row is. Evicted entries
are freed. Sliding-window layers stay transformers' own. Lengths have a mirror on the CPU, so that
no layer waits for the device.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from kvbench.engine.layer import RaggedLayer
from kvbench.errors import UserError
from kvbench.plugin import Need, Observer


class RaggedCache(Cache):
    """A cache whose full-attention layers are ragged. Batches are padded on the left.

    Attributes:
        valid: Which logical columns are tokens, bool `[B, S]`; None before the first forward.
        padded: Whether any column is padding.
        ids: Token ids of the forwards so far, or None where embeddings were given.
        observers: What is observed, by need.
        budget_entries, held_entries: What every row may keep over all layers and heads, and what
            was really held right after the last compression (None before one).
    """

    def __init__(self, config: Any) -> None:
        layers = [
            RaggedLayer() if type(layer) is DynamicLayer else layer
            for layer in DynamicCache(config=config).layers
        ]
        odd = {
            type(x).__name__
            for x in layers
            if not isinstance(x, RaggedLayer) and type(x) is not DynamicSlidingWindowLayer
        }
        if odd:
            raise UserError(f"layers of kind {', '.join(sorted(odd))} cannot be evicted from")
        super().__init__(layers=layers)
        self.observers: dict[Need, Observer] = {}
        self.reset_sequences()

    def reset_sequences(self) -> None:
        """Forget what was seen (the layers forget by `reset`)."""
        self.valid: Tensor | None = None
        self.padded = False
        self.ids: list[Tensor] | None = []
        self.budget_entries: list[int] | None = None
        self.held_entries: list[int] | None = None

    def reset(self) -> None:
        """Empty the cache."""
        super().reset()  # type: ignore[no-untyped-call]
        self.reset_sequences()

    @property
    def ragged(self) -> list[RaggedLayer]:
        """The full-attention layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    @property
    def batch(self) -> int:
        """Sequences in the cache."""
        return 0 if self.valid is None else int(self.valid.shape[0])

    @property
    def packed(self) -> bool:
        """Whether all full-attention layers were compressed."""
        return all(layer.packed for layer in self.ragged)

    def lengths(self) -> Tensor:
        """Tokens that every sequence has seen, int64 `[B]`."""
        assert self.valid is not None
        return self.valid.sum(-1)

    def positions(self, col: Tensor) -> Tensor:
        """Logical positions of columns `[B, H, n]`, int64: padding does not count."""
        assert self.valid is not None
        col = col.long()
        if not self.padded:
            return col
        rank = (self.valid.long().cumsum(-1) - 1).clamp(min=0)
        return rank[:, None].expand(-1, col.shape[1], -1).gather(-1, col)

    def live_entries(self, row: int | None = None) -> int:
        """Entries held in the full-attention layers, of one sequence or of all."""
        return sum(layer.entries(row) for layer in self.ragged)

    def live_bytes(self, row: int | None = None) -> int:
        """Bytes of the live entries of the full-attention layers: K, V and extras."""
        return sum(layer.entries(row) * layer.entry_bytes() for layer in self.ragged)

    def allocated_bytes(self) -> int:
        """Bytes that the full-attention layers own, room and bookkeeping included."""
        return sum(layer.allocated_bytes() for layer in self.ragged)

    def full_bytes(self, row: int) -> int:
        """Bytes that the full cache would hold of one sequence's tokens (K and V)."""
        assert self.valid is not None
        tokens = int(self.valid[row].sum())
        return sum(
            tokens * x.heads * 2 * x.dim * x.key.element_size()
            for x in self.ragged
            if x.key is not None
        )

    def kept(self) -> list[Tensor | None]:
        """Which columns are held: per layer bool `[B, H, S]`, None for sliding-window layers."""
        assert self.valid is not None
        out: list[Tensor | None] = []
        for layer in self.layers:
            if not isinstance(layer, RaggedLayer):
                out.append(None)
                continue
            held = torch.zeros(
                layer.batch * layer.heads, layer.seen, dtype=torch.bool, device=self.valid.device
            )
            if layer.packed:
                segment = torch.arange(len(layer.length), device=held.device)
                count = torch.tensor(layer.length, device=held.device)
                segment = segment.repeat_interleave(count)
                held[segment, layer.col[layer.rows()].long()] = True
                out.append(held.view(layer.batch, layer.heads, -1))
            else:
                out.append(self.valid[:, None].expand(-1, layer.heads, -1).clone())
        return out

    def fork(self) -> Self:
        """Give a cache that may go on alone."""
        other = copy.copy(self)
        other.layers = [
            x.fork() if isinstance(x, RaggedLayer) else copy.copy(x) for x in self.layers
        ]
        other.observers = {need: o.fork() for need, o in self.observers.items()}
        other.ids = None if self.ids is None else [*self.ids]
        return other
