"""The ragged cache: every (sequence, KV head) of a layer holds its own number of entries.

A full-attention layer is dense during the prefill (`[B, H, S, d]`) and packed once it is
compressed: one K and one V of rows `[rows, d]`. Segment `s = b * H + h` owns the rows
`start[s] : start[s] + length[s]`, and `col[row]` is the logical column of a row. Evicted entries
are freed. Sliding-window layers remain those of transformers. Lengths are mirrored on the CPU, so
that no layer waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from kvbench.engine.observers import SurprisalObserver
from kvbench.engine.pruning import Pruning, TowerFacts
from kvbench.engine.reading import Reading
from kvbench.engine.segments import starts
from kvbench.engine.upkeep import Upkeep
from kvbench.errors import UserError, out_of_memory
from kvbench.plugin import Need, Observer, Separable


class RaggedCache(Cache):
    """A cache whose full-attention layers are ragged. Batches are padded on the left.

    Attributes:
        valid: Which logical columns are tokens, bool `[B, S]`; None before the first forward.
        padded: Whether any column is padding.
        shift: By how much the next position of every sequence differs from its number of tokens,
            int64 `[B]`. Images of models with M-RoPE take fewer positions than tokens.
        visual: Which columns are tokens of images or videos, bool `[B, S]`; None for a text model,
            or if the model was given embeddings.
        pruning: Prunes the visual tokens of the prefill; None prunes nothing.
        tower: What the vision tower has seen, if `pruning` reads it.
        pruned: Which columns it has pruned, bool `[B, S]`; None: none.
        ids: Token ids of the forwards so far; None if a forward was given embeddings.
        observers: Observers of layers, by need.
        token_observers: Observers of tokens, by need.
        turns: First logical column of every turn after the first, for every sequence.
        asked: Tokens of the question at the end of every sequence; 0 if there is none.
        upkeep: State between cuts, if the cache can be cut again.
        readings: What the queries of every sequence read; empty: all that is held.
        budget_entries, held_entries: Entries that each sequence may keep over all layers and heads
            (with a reader: that a query may read), and the number it held right after the last
            compression (None before the first).
        seconds: Time that the compression took.
        broken: What failed observers have raised, by need.
        spoiled: Whether a policy has changed dense K, V or observations in place.
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
        self.token_observers: dict[Need, SurprisalObserver] = {}
        self.upkeep: Upkeep | None = None
        self.pruning: Pruning | None = None
        self.tower: TowerFacts | None = None
        self.reset_sequences()

    def reset_sequences(self) -> None:
        """Forget all sequences; `reset` empties the layers as well."""
        self.valid: Tensor | None = None
        self.padded = False
        self.shift: Tensor | None = None
        self.visual: Tensor | None = None
        self.pruned: Tensor | None = None
        self.ids: list[Tensor] | None = []
        self.turns: list[list[int]] = []
        self.asked = 0
        self.readings: list[Reading] = []
        self.budget_entries: list[int] | None = None
        self.held_entries: list[int] | None = None
        self.seconds = 0.0
        self.broken: dict[Need, Exception] = {}
        self.spoiled = False

    def reset(self) -> None:
        """Empty the cache."""
        super().reset()  # type: ignore[no-untyped-call]
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                # The reset of transformers 5.17 only zeroes the tensors.
                layer.keys = layer.values = None
                layer.is_initialized, layer.cumulative_length = False, 0
        self.reset_sequences()

    def ready(self) -> None:
        """Called before every forward. Raises ValueError if the cache cannot take one."""

    @property
    def ragged(self) -> list[RaggedLayer]:
        """The full-attention layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    @property
    def slides(self) -> bool:
        """Whether there are sliding-window layers, which count padding columns too."""
        return any(isinstance(layer, DynamicSlidingWindowLayer) for layer in self.layers)

    @property
    def batch(self) -> int:
        """Sequences in the cache."""
        return 0 if self.valid is None else int(self.valid.shape[0])

    @property
    def packed(self) -> bool:
        """Whether all full-attention layers are compressed."""
        return all(layer.packed for layer in self.ragged)

    def lengths(self) -> Tensor:
        """Tokens that every sequence has seen, int64 `[B]`."""
        assert self.valid is not None
        return self.valid.sum(-1)

    def positions(self, col: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logical positions of columns `[B, H, n]`, int64; padding does not count."""
        assert self.valid is not None
        col = col.long()
        if not self.padded:
            return col
        valid = self.valid if rows is None else self.valid[rows]
        rank = (valid.long().cumsum(-1) - 1).clamp(min=0).to(col.device)
        return rank[:, None].expand(-1, col.shape[1], -1).gather(-1, col)

    def visual_tokens(self) -> list[int]:
        """Tokens of images and videos that every sequence has seen."""
        if self.visual is None:
            return [0] * self.batch
        counts: list[int] = self.visual.sum(-1).tolist()
        return counts

    def visual_entries(self, row: int) -> int:
        """Entries of images and videos that a sequence holds in the full-attention layers."""
        if self.visual is None:
            return 0
        counts = [layer.entries_among(self.visual[row], row) for layer in self.ragged]
        return int(torch.stack([count.to(counts[0].device) for count in counts]).sum())

    def live_entries(self, row: int | None = None) -> int:
        """Entries held in the full-attention layers, by one sequence or by all."""
        return sum(layer.entries(row) for layer in self.ragged)

    def live_bytes(self, row: int | None = None) -> int:
        """Bytes of the live entries of the full-attention layers: K, V, extras and summaries."""
        return sum(layer.live_bytes(row) for layer in self.ragged) + self._summary_bytes(row)

    def read_bytes(self, row: int) -> int:
        """Bytes that a decode step reads for one sequence: all that is live, without a reader."""
        if not self.readings:
            return self.live_bytes(row)
        held = sum(layer.live_bytes(row) for layer in self.ragged)
        entries = self.live_entries(row)
        few = min(self.readings[row].total, entries)
        return held * few // max(1, entries) + self._summary_bytes(row)

    def allocated_bytes(self, row: int | None = None) -> int:
        """Bytes that the full-attention layers own, including free room and bookkeeping."""
        owned = sum(layer.allocated_bytes(row) for layer in self.ragged)
        return owned + self._summary_bytes(row)

    def _summary_bytes(self, row: int | None) -> int:
        """Bytes that a reader keeps beside the entries of one sequence or of all."""
        return sum(
            how.summary_bytes(i, layer.length[r * layer.heads :][: layer.heads], layer.number_bytes)
            for i, layer in enumerate(self.ragged)
            for r, how in enumerate(self.readings)
            if row in (r, None) and layer.packed
        )

    def full_bytes(self, row: int) -> int:
        """Bytes of K and V that the full cache would hold for one sequence."""
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
            where = layer.col.device if layer.packed else self.valid.device
            held = torch.zeros(
                layer.batch * layer.heads, layer.seen, dtype=torch.bool, device=where
            )
            if layer.packed:
                segment = torch.arange(len(layer.length), device=held.device)
                count = torch.tensor(layer.length, device=held.device)
                segment = segment.repeat_interleave(count)
                held[segment, layer.col[layer.rows()].long()] = True
                out.append(held.view(layer.batch, layer.heads, -1).to(self.valid.device))
            else:
                out.append(self.valid[:, None].expand(-1, layer.heads, -1).clone())
        return out

    def fork(self) -> Self:
        """Return a cache that can continue on its own; dense tensors are shared."""
        other = copy.copy(self)
        other.layers = [
            x.fork() if isinstance(x, RaggedLayer) else copy.copy(x) for x in self.layers
        ]
        other.observers = {need: o.fork() for need, o in self.observers.items()}
        other.token_observers = {need: o.fork() for need, o in self.token_observers.items()}
        other.ids = None if self.ids is None else [*self.ids]
        other.turns = [[*starts] for starts in self.turns]
        other.broken = dict(self.broken)
        other.budget_entries = None if self.budget_entries is None else [*self.budget_entries]
        other.held_entries = None if self.held_entries is None else [*self.held_entries]
        other.upkeep = None if self.upkeep is None else self.upkeep.fork()
        return other

    @contextmanager
    def blaming(self, need: Need) -> Iterator[None]:
        """Note what the observer of a need raises, so that only the policies that need it fail.

        An observer can be foreign code.
        """
        try:
            yield
        except Exception as error:
            if out_of_memory(error):
                raise
            self.broken[need] = error

    @property
    def separable(self) -> bool:
        """Whether all observers can be split into their sequences."""
        return all(isinstance(one, Separable) for one in self.observers.values())

    def sequence(self, row: int) -> Self:
        """One sequence of a dense text cache, with its separable observers, without its padding.

        Its K and V are copies, unless it is the only sequence.
        """
        assert self.valid is not None
        tokens, here = int(self.valid[row].sum()), slice(row, row + 1)
        out = self.fork()
        out.valid, out.padded = self.valid[here, -tokens:], False
        out.shift = None if self.shift is None else self.shift[here]
        out.ids = None if self.ids is None else [torch.cat(self.ids, 1)[here, -tokens:]]
        out.visual = None if self.visual is None else self.visual[here, -tokens:]
        padding = self.valid.shape[1] - tokens
        out.turns = [[start - padding for start in starts] for starts in self.turns[here]]
        both: list[dict[Need, Any]] = [out.observers, out.token_observers]
        for own in both:
            for need, one in own.items():
                if isinstance(one, Separable) and need not in out.broken:
                    with out.blaming(need):
                        own[need] = one.sequence(row, tokens)
        out.layers = self.layers_of(row, tokens)
        return out

    def layers_of(self, row: int, tokens: int) -> list[Any]:
        """The layers of one sequence of a dense cache, which has `tokens` tokens."""
        return [_dense_sequence(layer, slice(row, row + 1), tokens) for layer in self.layers]

    @staticmethod
    def stack(caches: Sequence[RaggedCache]) -> RaggedCache:
        """Join packed caches in one batch; shorter ones are padded on the left.

        Args:
            caches: Packed caches of the same model; they are not changed. If all of them have an
                upkeep (of one policy), the joined cache has one for all sequences.

        Returns:
            A cache with the sequences of all, in order.
        """
        out = copy.copy(caches[0])
        valids = [c.valid for c in caches if c.valid is not None]
        seen = max(v.shape[1] for v in valids)
        shifts = [seen - v.shape[1] for v in valids]
        rows = [torch.nn.functional.pad(v, (s, 0)) for v, s in zip(valids, shifts, strict=True)]
        out.valid = torch.cat(rows)
        out.padded = any(s > 0 for s in shifts) or any(c.padded for c in caches)
        out.shift = torch.cat([c.shift for c in caches if c.shift is not None])
        out.visual = out.pruned = out.pruning = out.tower = None
        if all(c.visual is not None for c in caches):
            seen_as = [c.visual for c in caches if c.visual is not None]
            padded = [
                torch.nn.functional.pad(v, (s, 0)) for v, s in zip(seen_as, shifts, strict=True)
            ]
            out.visual = torch.cat(padded)
        out.ids = None
        out.broken = {need: error for c in caches for need, error in c.broken.items()}
        if all(c.upkeep is not None for c in caches):
            out.upkeep = Upkeep.stack([c.upkeep for c in caches if c.upkeep is not None])
            kinds = caches[0].observers.items()
            out.observers = {n: o.stack([c.observers[n] for c in caches]) for n, o in kinds}
            tokens = caches[0].token_observers.items()
            out.token_observers = {
                n: o.stack([c.token_observers[n] for c in caches]) for n, o in tokens
            }
            out.turns = [
                [t + s for t in (c.turns[r] if c.turns else [])]
                for c, s in zip(caches, shifts, strict=True)
                for r in range(c.batch)
            ]
        else:
            out.upkeep, out.observers, out.token_observers, out.turns = None, {}, {}, []
        out.readings = [one for c in caches for one in c.readings]
        out.budget_entries = [n for c in caches for n in (c.budget_entries or [])]
        out.held_entries = [n for c in caches for n in (c.held_entries or [])]
        layers: list[Any] = []
        for parts in zip(*(c.layers for c in caches), strict=True):
            ragged = [p for p in parts if isinstance(p, RaggedLayer)]
            layers.append(_ragged(ragged, shifts, seen) if ragged else _sliding(list(parts), seen))
        out.layers = layers
        return out

    def settle(self) -> None:
        """Free what only further cuts would need: no further cut will come."""
        self.upkeep, self.observers, self.token_observers = None, {}, {}
        for layer in self.ragged:
            layer.extras, layer.state = {}, []


def _dense_sequence(layer: Any, here: slice, tokens: int) -> Any:
    """One sequence of a dense or a sliding-window layer; its last `tokens` columns are tokens."""
    out = copy.copy(layer)
    if isinstance(out, RaggedLayer):
        assert out.key is not None and out.value is not None
        own = out.key[here, :, -tokens:], out.value[here, :, -tokens:]
        out.key, out.value = (x.contiguous() for x in own)
        out.batch, out.seen = 1, tokens
    elif out.is_initialized:
        width = min(tokens, out.keys.shape[2])
        out.keys, out.values = out.keys[here, :, -width:], out.values[here, :, -width:]
        out.cumulative_length = tokens
    return out


def _ragged(parts: list[RaggedLayer], shifts: list[int], seen: int) -> RaggedLayer:
    out = copy.copy(parts[0])
    out.batch = sum(p.batch for p in parts)
    out.seen = seen
    out.state = [held for p in parts for held in (p.state or [{}] * p.batch)]
    out.key = torch.cat([p.key for p in parts if p.key is not None])
    out.value = torch.cat([p.value for p in parts if p.value is not None])
    out.col = torch.cat([p.col + s for p, s in zip(parts, shifts, strict=True)])
    common = set.intersection(*(set(p.extras) for p in parts))
    out.extras = {
        name: torch.cat([p.extras[name] for p in parts])
        for name in parts[0].extras
        if name in common
    }
    orders = [p.order for p in parts if p.order is not None]
    out.order = torch.cat(orders) if orders else None
    out.coded = [n for p in parts for n in p.coded]
    out.room = [n for p in parts for n in p.room]
    out.length = [n for p in parts for n in p.length]
    out.start = starts(out.room)
    out.forget_bounds()
    return out


def _sliding(parts: list[Any], seen: int) -> DynamicSlidingWindowLayer:
    out: DynamicSlidingWindowLayer = copy.copy(parts[0])
    if not out.is_initialized:
        return out
    width = min(seen, out.sliding_window - 1)

    def joined(tensors: list[Tensor]) -> Tensor:
        pad = torch.nn.functional.pad
        return torch.cat([pad(t, (0, 0, width - t.shape[2], 0)) for t in tensors])

    out.keys, out.values = joined([p.keys for p in parts]), joined([p.values for p in parts])
    out.cumulative_length = seen
    return out
