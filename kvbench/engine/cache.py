"""The ragged cache, in which every (sequence, KV head) of a layer holds its own number of entries.

A full-attention layer is dense during prefill (`[B, H, S, d]`) and packed once compressed: one K and one V of rows
`[rows, d]`. Segment `s = b * H + h` owns the rows `start[s] : start[s] + length[s]`, and `col[row]` is the logical
column of a row. Evicted entries are freed. The cells of a grid can read entries in the dense layers of their prefill
instead (`kvbench.engine.shared`), and own rows only for new tokens. Sliding-window layers and recurrent states stay
those of transformers. Lengths are mirrored on the CPU, so that no layer waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvbench.engine.eviction_state import EvictionState
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.linear import RaggedHybridLayer, combine_states, copied, reset_states, states_of
from kvbench.engine.observers import SurprisalObserver
from kvbench.engine.pruning import Pruning, TowerFacts
from kvbench.engine.reading import Reading
from kvbench.engine.segments import ranks_of_tokens, starts
from kvbench.errors import UserError, out_of_memory
from kvbench.plugin import Need, Observer, Separable


class RaggedCache(Cache):
    """A cache whose full-attention layers are ragged. Batches are padded on the left.

    Attributes:
        valid: Mask of logical columns that are tokens, bool `[B, S]`; None before the first forward.
        padded: Whether any column is padding.
        shift: Difference between the next position and the token count of every sequence, int64 `[B]`. Images of models
            with M-RoPE take fewer positions than tokens.
        visual: Mask of columns that are image or video tokens, bool `[B, S]`; None for a text model or if the model
            received embeddings.
        pruning: Method that prunes visual tokens during prefill; None prunes nothing.
        tower: Observations of the vision tower, if `pruning` uses them.
        pruned: Mask of pruned columns, bool `[B, S]`; None if none is pruned.
        ids: Token ids of the forwards so far; None if a forward received embeddings.
        following: Token ids that follow the cached ones, `[B, n]` each, by `AnswerAttention.target`: for policies that
            may see them. Empty if they are unknown.
        observers: Layer observers by need.
        token_observers: Token observers by need.
        turns: First logical column of every turn after the first, per sequence.
        asked: Length in tokens of the question at the end of every sequence; 0 if there is none.
        eviction_state: Decode-time eviction state, if the cache can be evicted from again.
        readings: What the queries of every sequence read; empty if they read all entries.
        budget_entries, held_entries: Entries that each sequence may keep over all layers and heads (with a reader: that
            a query may read), and the number held right after the last compression (None before the first).
        seconds: Compression time.
        broken: Exceptions raised by observers, by need.
        modified_in_place: Whether a policy has changed dense K, V or observations in place.
    """

    def __init__(self, config: Any) -> None:
        layers = [_layer_for(layer) for layer in DynamicCache(config=config).layers]
        unsupported = {
            type(candidate).__name__
            for candidate in layers
            if not isinstance(candidate, RaggedLayer) and type(candidate) not in _UNCHANGED
        }
        if unsupported:
            raise UserError(f"layers of kind {', '.join(sorted(unsupported))} do not support eviction")
        super().__init__(layers=layers)
        self.observers: dict[Need, Observer] = {}
        self.token_observers: dict[Need, SurprisalObserver] = {}
        self.eviction_state: EvictionState | None = None
        self.pruning: Pruning | None = None
        self.tower: TowerFacts | None = None
        self.reset_sequences()

    def reset_sequences(self) -> None:
        """Reset the per-sequence state; `reset` empties the layers as well."""
        self.valid: Tensor | None = None
        self.padded = False
        self.shift: Tensor | None = None
        self.visual: Tensor | None = None
        self.pruned: Tensor | None = None
        self.ids: list[Tensor] | None = []
        self.following: Mapping[str, Tensor] = {}
        self.turns: list[list[int]] = []
        self.asked = 0
        self.readings: list[Reading] = []
        self.budget_entries: list[int] | None = None
        self.held_entries: list[int] | None = None
        self.seconds = 0.0
        self.broken: dict[Need, Exception] = {}
        self.modified_in_place = False

    def reset(self) -> None:
        """Empty the cache."""
        super().reset()  # type: ignore[no-untyped-call]
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                reset_states(layer)
        self.reset_sequences()

    def ready(self) -> None:
        """Prepare for a forward. Raises ValueError if the cache cannot take one."""

    @property
    def ragged(self) -> list[RaggedLayer]:
        """Return the full-attention layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    @property
    def forbids_gaps(self) -> bool:
        """Return whether padding between tokens changes results: sliding windows count it, recurrent states read it."""
        return any(isinstance(layer, DynamicSlidingWindowLayer | LinearAttentionLayer) for layer in self.layers)

    def state_bytes(self, sequence_index: int | None = None) -> int:
        """Return the bytes of recurrent and convolution states, of one sequence or of all; nothing evicts them."""
        states = [state for layer in self.layers for state in states_of(layer)]
        return sum(state.nbytes // (1 if sequence_index is None else len(state)) for state in states)

    @property
    def batch(self) -> int:
        """Return the number of sequences."""
        return 0 if self.valid is None else int(self.valid.shape[0])

    @property
    def packed(self) -> bool:
        """Return whether all full-attention layers are compressed."""
        return all(layer.packed for layer in self.ragged)

    @property
    def upkeep(self) -> EvictionState | None:
        """Return `eviction_state`, whose earlier name this is."""
        return self.eviction_state

    def lengths(self) -> Tensor:
        """Return the number of tokens each sequence has seen, int64 `[B]`."""
        assert self.valid is not None
        return self.valid.sum(-1)

    def positions(self, columns: Tensor, sequence_indices: Tensor | None = None) -> Tensor:
        """Return the logical positions of columns `[B, H, n]`, int64; padding does not count."""
        assert self.valid is not None
        columns = columns.long()
        if not self.padded:
            return columns
        token_mask = self.valid if sequence_indices is None else self.valid[sequence_indices]
        token_ranks = ranks_of_tokens(token_mask).to(columns.device)
        return token_ranks[:, None].expand(-1, columns.shape[1], -1).gather(-1, columns)

    def visual_tokens(self) -> list[int]:
        """Return the number of image and video tokens each sequence has seen."""
        if self.visual is None:
            return [0] * self.batch
        token_counts: list[int] = self.visual.sum(-1).tolist()
        return token_counts

    def visual_entries(self, sequence_index: int) -> int:
        """Count the image and video entries of a sequence in the full-attention layers."""
        if self.visual is None:
            return 0
        entry_counts = [layer.entries_among(self.visual[sequence_index], sequence_index) for layer in self.ragged]
        return int(torch.stack([entry_count.to(entry_counts[0].device) for entry_count in entry_counts]).sum())

    def live_entries(self, sequence_index: int | None = None) -> int:
        """Count the entries of one sequence or of all in the full-attention layers."""
        return sum(layer.entries(sequence_index) for layer in self.ragged)

    def live_bytes(self, sequence_index: int | None = None) -> int:
        """Return the bytes of live entries in the full-attention layers: K, V, per-entry state and summaries."""
        return sum(layer.live_bytes(sequence_index) for layer in self.ragged) + self._summary_bytes(sequence_index)

    def read_bytes(self, sequence_index: int) -> int:
        """Return the bytes read per decode step for one sequence (all live entries if there is no reader)."""
        if not self.readings:
            return self.live_bytes(sequence_index)
        live_bytes = sum(layer.live_bytes(sequence_index) for layer in self.ragged)
        entry_count = self.live_entries(sequence_index)
        read_entries = min(self.readings[sequence_index].total, entry_count)
        return live_bytes * read_entries // max(1, entry_count) + self._summary_bytes(sequence_index)

    def allocated_bytes(self, sequence_index: int | None = None) -> int:
        """Return the bytes allocated by the full-attention layers, including free rows and bookkeeping."""
        owned_bytes = sum(layer.allocated_bytes(sequence_index) for layer in self.ragged)
        return owned_bytes + self._summary_bytes(sequence_index)

    def footprint(self, sequence_index: int) -> dict[str, Any]:
        """Return the current memory cost of a sequence, by result column."""
        live_bytes = self.live_bytes(sequence_index)
        return {
            "kv_bytes_live": live_bytes,
            "kv_bytes_read": self.read_bytes(sequence_index) if self.readings else live_bytes,
            "kv_bytes_allocated": self.allocated_bytes(sequence_index),
            "kv_bytes_full": self.full_bytes(sequence_index),
            "visual_tokens": self.visual_tokens()[sequence_index],
            "held_visual": self.visual_entries(sequence_index),
            "state_bytes": self.state_bytes(sequence_index),
        }

    def _summary_bytes(self, sequence_index: int | None) -> int:
        """Return the bytes of the reader's summaries for one sequence or for all."""
        if not self.readings:
            return 0
        return sum(
            reading.summary_bytes(layer_index, layer.length[r * layer.heads :][: layer.heads], layer.number_bytes)
            for layer_index, layer in enumerate(self.ragged)
            for r, reading in enumerate(self.readings)
            if sequence_index in (r, None) and layer.packed
        )

    def full_bytes(self, sequence_index: int) -> int:
        """Return the bytes of K and V that the full cache would hold for one sequence."""
        assert self.valid is not None
        token_count = int(self.valid[sequence_index].sum()) if self.padded else self.valid.shape[1]
        return sum(
            token_count * layer.heads * layer.entry_numbers * layer.key.element_size()
            for layer in self.ragged
            if layer.key is not None
        )

    def kept(self) -> list[Tensor | None]:
        """Return masks of kept columns: per layer bool `[B, H, S]`, None for sliding-window layers."""
        assert self.valid is not None
        column_masks: list[Tensor | None] = []
        for layer in self.layers:
            if not isinstance(layer, RaggedLayer):
                column_masks.append(None)
                continue
            column_mask = self.valid[:, None].repeat(1, layer.heads, 1)
            if layer.packed:
                column_mask = torch.zeros_like(column_mask, device=layer.col.device)
                for sequence_index in range(layer.batch):
                    column_mask[(sequence_index, *layer.columns_of(sequence_index))] = True
            column_masks.append(column_mask.to(self.valid.device))
        return column_masks

    def fork(self, ragged_layers: Iterable[RaggedLayer] | None = None) -> Self:
        """Return an independent copy; dense tensors are shared.

        Args:
            ragged_layers: Full-attention layers of the copy, in order; None: copies of this cache's.
        """
        forked = copy.copy(self)
        if ragged_layers is None:
            ragged_layers = (layer.fork() for layer in self.ragged)
        new_layers = iter(ragged_layers)
        forked.layers = [next(new_layers) if isinstance(layer, RaggedLayer) else copied(layer) for layer in self.layers]
        forked.observers = {need: observer.fork() for need, observer in self.observers.items()}
        forked.token_observers = {need: observer.fork() for need, observer in self.token_observers.items()}
        forked.ids = None if self.ids is None else [*self.ids]
        forked.turns = [[*turn_starts] for turn_starts in self.turns]
        forked.broken = dict(self.broken)
        forked.budget_entries = None if self.budget_entries is None else [*self.budget_entries]
        forked.held_entries = None if self.held_entries is None else [*self.held_entries]
        forked.eviction_state = None if self.eviction_state is None else self.eviction_state.fork()
        return forked

    @contextmanager
    def blaming(self, need: Need) -> Iterator[None]:
        """Record exceptions of a need's observer, which may be plugin code, so only the policies that need it fail."""
        try:
            yield
        except Exception as error:
            if out_of_memory(error):
                raise
            self.broken[need] = error

    @property
    def separable(self) -> bool:
        """Return whether all observers can be split by sequence."""
        return all(isinstance(observer, Separable) for observer in self.observers.values())

    def sequence(self, sequence_index: int) -> Self:
        """Return one sequence of a dense text cache without padding, with its separable observers.

        K and V are copied unless it is the only sequence.
        """
        assert self.valid is not None
        token_count, sequence_slice = int(self.valid[sequence_index].sum()), slice(sequence_index, sequence_index + 1)
        sequence_cache = self.fork()
        sequence_cache.valid, sequence_cache.padded = self.valid[sequence_slice, -token_count:], False
        sequence_cache.shift = None if self.shift is None else self.shift[sequence_slice]
        sequence_cache.ids = None if self.ids is None else [torch.cat(self.ids, 1)[sequence_slice, -token_count:]]
        sequence_cache.visual = None if self.visual is None else self.visual[sequence_slice, -token_count:]
        padding = self.valid.shape[1] - token_count
        sequence_cache.turns = [
            [turn_start - padding for turn_start in turn_starts] for turn_starts in self.turns[sequence_slice]
        ]
        observer_groups: list[dict[Need, Any]] = [
            sequence_cache.observers,
            sequence_cache.token_observers,
        ]
        for observers in observer_groups:
            for need, observer in observers.items():
                if isinstance(observer, Separable) and need not in sequence_cache.broken:
                    with sequence_cache.blaming(need):
                        observers[need] = observer.sequence(sequence_index, token_count)
        sequence_cache.layers = self.layers_of(sequence_index, token_count)
        return sequence_cache

    def layers_of(self, sequence_index: int, token_count: int) -> list[Any]:
        """Return the layers of one sequence of a dense cache that has `token_count` tokens."""
        return [_dense_sequence(layer, slice(sequence_index, sequence_index + 1), token_count) for layer in self.layers]

    @staticmethod
    def stack(caches: Sequence[RaggedCache]) -> RaggedCache:
        """Join packed caches in one batch; shorter ones are padded on the left.

        Args:
            caches: Packed caches of the same model, left unchanged. If all have a decode-time eviction state (of one
                policy), the result has one for all sequences.

        Returns:
            A cache with the sequences of all, in order.
        """
        stacked = copy.copy(caches[0])
        token_masks = [source_cache.valid for source_cache in caches if source_cache.valid is not None]
        column_count = max(column_mask.shape[1] for column_mask in token_masks)
        shifts = [column_count - column_mask.shape[1] for column_mask in token_masks]
        padded_masks = [
            torch.nn.functional.pad(column_mask, (shift, 0))
            for column_mask, shift in zip(token_masks, shifts, strict=True)
        ]
        stacked.valid = torch.cat(padded_masks)
        stacked.padded = any(shift > 0 for shift in shifts) or any(source_cache.padded for source_cache in caches)
        stacked.shift = torch.cat([source_cache.shift for source_cache in caches if source_cache.shift is not None])
        stacked.visual = stacked.pruned = stacked.pruning = stacked.tower = None
        if all(source_cache.visual is not None for source_cache in caches):
            visual_masks = [source_cache.visual for source_cache in caches if source_cache.visual is not None]
            padded_visual = [
                torch.nn.functional.pad(column_mask, (shift, 0))
                for column_mask, shift in zip(visual_masks, shifts, strict=True)
            ]
            stacked.visual = torch.cat(padded_visual)
        stacked.ids = None
        stacked.broken = {need: error for source_cache in caches for need, error in source_cache.broken.items()}
        if all(source_cache.eviction_state is not None for source_cache in caches):
            stacked.eviction_state = EvictionState.stack(
                [source_cache.eviction_state for source_cache in caches if source_cache.eviction_state is not None]
            )
            observer_items = caches[0].observers.items()
            stacked.observers = {
                item: observer.stack([source_cache.observers[item] for source_cache in caches])
                for item, observer in observer_items
            }
            token_observer_items = caches[0].token_observers.items()
            stacked.token_observers = {
                item: observer.stack([source_cache.token_observers[item] for source_cache in caches])
                for item, observer in token_observer_items
            }
            stacked.turns = [
                [
                    turn_start + shift
                    for turn_start in (source_cache.turns[sequence_index] if source_cache.turns else [])
                ]
                for source_cache, shift in zip(caches, shifts, strict=True)
                for sequence_index in range(source_cache.batch)
            ]
        else:
            stacked.eviction_state, stacked.observers, stacked.token_observers, stacked.turns = None, {}, {}, []
        stacked.readings = [reading for source_cache in caches for reading in source_cache.readings]
        stacked.budget_entries = [item for source_cache in caches for item in (source_cache.budget_entries or [])]
        stacked.held_entries = [item for source_cache in caches for item in (source_cache.held_entries or [])]
        layers: list[Any] = []
        layer: Any
        for layer_parts in zip(*(source_cache.layers for source_cache in caches), strict=True):
            ragged_layers = [layer_part for layer_part in layer_parts if isinstance(layer_part, RaggedLayer)]
            if ragged_layers:
                layer = _stack_ragged(ragged_layers, shifts, column_count)
            elif isinstance(layer_parts[0], DynamicSlidingWindowLayer):
                layer = _stack_sliding(list(layer_parts), column_count)
            else:
                layer = copy.copy(layer_parts[0])
            layers.append(combine_states(layer, layer_parts, torch.cat))
        stacked.layers = layers
        return stacked

    def detach_state(self) -> None:
        """Free the state of later eviction steps; none will follow."""
        self.eviction_state, self.observers, self.token_observers = None, {}, {}
        for layer in self.ragged:
            layer.extras, layer.state = {}, []


_UNCHANGED = (DynamicSlidingWindowLayer, LinearAttentionLayer, DummyLayer)
"""Layers of transformers that the ragged cache uses as they are."""


def _layer_for(layer: Any) -> Any:
    """Return the layer that replaces one of transformers' dynamic cache."""
    if type(layer) is DynamicLayer:
        return RaggedLayer()
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return RaggedHybridLayer(layer.number_of_states)
    return layer


def _dense_sequence(layer: Any, sequence_slice: slice, tokens: int) -> Any:
    """Return one sequence of a dense or sliding-window layer; its last `tokens` columns are tokens."""
    sequence_layer = copy.copy(layer)
    if isinstance(sequence_layer, RaggedLayer):
        assert sequence_layer.key is not None and sequence_layer.value is not None
        key_value = (
            sequence_layer.key[sequence_slice, :, -tokens:],
            sequence_layer.value[sequence_slice, :, -tokens:],
        )
        # A view of the batch would keep all of it: cells that share this sequence outlive the others.
        sequence_layer.key, sequence_layer.value = (
            tensor.clone(memory_format=torch.contiguous_format) if layer.batch > 1 else tensor.contiguous()
            for tensor in key_value
        )
        sequence_layer.batch, sequence_layer.seen = 1, tokens
    elif isinstance(sequence_layer, DynamicSlidingWindowLayer) and sequence_layer.is_initialized:
        assert sequence_layer.keys is not None and sequence_layer.values is not None
        column_count = min(tokens, sequence_layer.keys.shape[2])
        sequence_layer.keys = sequence_layer.keys[sequence_slice, :, -column_count:]
        sequence_layer.values = sequence_layer.values[sequence_slice, :, -column_count:]
        sequence_layer.cumulative_length = tokens
    return combine_states(sequence_layer, [layer], lambda states: states[0][sequence_slice].clone())


def _stack_ragged(layer_parts: list[RaggedLayer], shifts: list[int], column_count: int) -> RaggedLayer:
    stacked = copy.copy(layer_parts[0])
    stacked.batch = sum(layer_part.batch for layer_part in layer_parts)
    stacked.seen = column_count
    stacked.state = [
        merger_state for layer_part in layer_parts for merger_state in (layer_part.state or [{}] * layer_part.batch)
    ]
    stacked.key = torch.cat([layer_part.key for layer_part in layer_parts if layer_part.key is not None])
    stacked.value = torch.cat([layer_part.value for layer_part in layer_parts if layer_part.value is not None])
    stacked.col = torch.cat([layer_part.col + shift for layer_part, shift in zip(layer_parts, shifts, strict=True)])
    shared_names = set.intersection(*(set(layer_part.extras) for layer_part in layer_parts))
    stacked.extras = {
        extra_name: torch.cat([layer_part.extras[extra_name] for layer_part in layer_parts])
        for extra_name in layer_parts[0].extras
        if extra_name in shared_names
    }
    orders = [layer_part.order for layer_part in layer_parts if layer_part.order is not None]
    stacked.order = torch.cat(orders) if orders else None
    stacked.shared = [entries for layer_part in layer_parts for entries in layer_part.shared]
    stacked.shared_start = [
        first_column + shift
        for layer_part, shift in zip(layer_parts, shifts, strict=True)
        for first_column in layer_part.shared_start
    ]
    stacked.reserved = max(layer_part.reserved for layer_part in layer_parts)
    stacked.coded = [segment_size for layer_part in layer_parts for segment_size in layer_part.coded]
    stacked.room = [segment_size for layer_part in layer_parts for segment_size in layer_part.room]
    stacked.length = [segment_size for layer_part in layer_parts for segment_size in layer_part.length]
    stacked.start = starts(stacked.room)
    stacked.forget_bounds()
    return stacked


def _stack_sliding(layer_parts: list[Any], column_count: int) -> DynamicSlidingWindowLayer:
    stacked: DynamicSlidingWindowLayer = copy.copy(layer_parts[0])
    if not stacked.is_initialized:
        return stacked
    window_width = min(column_count, stacked.sliding_window - 1)

    def join_padded(tensors: list[Tensor]) -> Tensor:
        pad_tensor = torch.nn.functional.pad
        return torch.cat([pad_tensor(tensor, (0, 0, window_width - tensor.shape[2], 0)) for tensor in tensors])

    stacked.keys = join_padded([layer_part.keys for layer_part in layer_parts])
    stacked.values = join_padded([layer_part.values for layer_part in layer_parts])
    stacked.cumulative_length = column_count
    return stacked
