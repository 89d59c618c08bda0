"""One full-attention layer of the ragged cache: dense during prefill, then packed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvbench.engine.channels import reordered, restored
from kvbench.engine.codes import Coded, Coding
from kvbench.engine.segments import NewTokens, gathered, marked, runs, starts
from kvbench.engine.shared import SharedEntries, shared_entries
from kvbench.view import Need
from kvbench.view.softmax import cap_of, sinks_of

_OWN_ROWS = 32
"""Rows by which the segments of a layer that shares entries grow: most answers are much shorter than their limit."""

_UNSUPPORTED = "a kvbench cache does not support beam search or assisted decoding"


class RaggedLayer(CacheLayerMixin):
    """K and V of one full-attention layer: dense during prefill, then packed.

    Attributes:
        seen: Logical length: all columns so far, including padding and evicted ones.
        start, length, room: First row, live rows and allocated rows of every segment (on the CPU).
        shared: What every sequence reads in the K and V of a prefill (packed): its oldest entries, which have no row
            here. None if all of its entries have rows.
        shared_start: Logical column of the first token of that prefill, for every sequence.
        reserved: Rows that a segment without rows gets with its first entry.
        coded: Oldest rows of every segment that are quantised or pruned; empty without `coding`.
        key, value: `[B, H, S, d]` while dense, `[rows, d]` once packed.
        col: Logical column of every row, int32 `[rows]` (packed).
        extras: Per-entry state (packed): the policy's by name, `[rows]`, and ongoing observations by need, `[rows, G]`.
        state: Merger state between eviction steps: per sequence, tensors `[1, ...]` by name; empty before the first
            step.
        scale: Scaling factor of the attention logits; see `LogitScale`.
        dim, value_dim: Channels of a key and of a value.
        is_latent: Whether entries are latents of MLA, whose value is a part of the key.
        coding: Storage format of packed keys and values; None stores them unchanged.
        order: Channel order of packed keys, `[B, H, d]`; None is the model's order.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reset()

    def reset(self) -> None:
        """Reset the layer to its initial state."""
        self.seen = 0
        self.packed = False
        self.batch = self.heads = self.dim = self.value_dim = 0
        self.is_latent = False
        self.scale = 1.0
        self.coding: Coding | None = None
        self.order: Tensor | None = None
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.col = torch.empty(0, dtype=torch.int32)
        self.extras: dict[str | Need, Tensor] = {}
        self.state: list[dict[str, Tensor]] = []
        self.start: list[int] = []
        self.length: list[int] = []
        self.coded: list[int] = []
        self.room: list[int] = []
        self.shared: list[SharedEntries | None] = []
        self.shared_start: list[int] = []
        self.reserved = 0
        self._addresses: Tensor | None = None
        self._shared_lengths: list[int] | None = None
        self._bounds: tuple[Tensor, Tensor] | None = None
        self._appended: tuple[Tensor, Tensor | None] = (self.col, None)
        self.pending: tuple[Tensor, Tensor] | None = None
        self.is_initialized = False
        self.closed = False

    # -- what transformers calls ------------------------------------------------------------------
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Read shapes, dtype and device from the first keys."""
        self.batch, self.heads, _, self.dim = key_states.shape
        self.value_dim = value_states.shape[-1]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Buffer the new K and V `[B, H, n, d]` until the attention function stores them."""
        if self.closed or self.pending is not None:
            raise ValueError("use this cache only inside its kvbench.attach(...) block")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.pending = (key_states, value_states)
        self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the logical length, on which positions and chunked prefill depend."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns and the offset of a full mask."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is unlimited."""
        return -1

    def crop(self, tokens_to_remove: Any) -> None:
        """Raise ValueError: evicted entries cannot be restored."""
        raise ValueError(_UNSUPPORTED)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Raise ValueError: sequences hold different entries, so beams cannot be reordered."""
        raise ValueError(_UNSUPPORTED)

    batch_repeat_interleave = reorder_cache
    batch_select_indices = reorder_cache

    # -- storing ----------------------------------------------------------------------------------
    def extend(self) -> tuple[Tensor, Tensor]:
        """Append the pending K and V to a dense layer; return all of them, `[B, H, S, d]`."""
        key, value = self.take_pending()
        # Every cell gathers its entries from these tensors, so keep them contiguous.
        self.key = key.contiguous() if self.key is None else torch.cat([self.key, key], dim=-2)
        previous_value = self.value
        self.value = value.contiguous() if previous_value is None else torch.cat([previous_value, value], dim=-2)
        return self.key, self.value

    def take_pending(self) -> tuple[Tensor, Tensor]:
        """Return the new K and V of this forward and clear them."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return pending

    def pack(
        self,
        key: Tensor,
        value: Tensor,
        entry_mask: Tensor,
        columns: Tensor,
        extras: Mapping[str | Need, Tensor],
        reserve: int | None = None,
        *,
        keeps_room: bool = False,
    ) -> None:
        """Keep only the chosen entries and free everything else.

        Args:
            key, value: `[B, H, n, d]`, or `[1, H, n, d]` if all sequences choose from the same entries; the key
                channels are in `order`.
            entry_mask: Entries to keep, bool `[B, H, n]`.
            columns: Logical columns, `[B, H, n]` or `[1, H, n]`, ascending along the last axis.
            extras: Per-entry state, `[B, H, n, ...]` each.
            reserve: Free rows behind every segment; None derives it from the number of kept entries.
            keeps_room: Whether to allocate as many rows as before, because as many entries will follow.
        """
        self.batch, self.heads, column_count = entry_mask.shape
        flat_mask = entry_mask.reshape(-1, column_count)
        self.length = flat_mask.sum(-1).tolist()
        kept_indices = marked(flat_mask.reshape(-1))
        rooms = zip(self.room, self.length, strict=True)
        target_rows = self._layout([max(8, room - kept) for room, kept in rooms] if keeps_room else reserve)
        # The gather fills the free rows with arbitrary entries, which is faster than skipping them.
        source_indices = torch.zeros(sum(self.room), dtype=torch.int64, device=key.device)
        source_indices[target_rows] = kept_indices
        shared_indices = source_indices % (self.heads * column_count) if len(key) < self.batch else source_indices
        self.key, self.value = gathered(key, shared_indices), gathered(value, shared_indices)
        self.col = gathered(columns[..., None].to(torch.int32), shared_indices).squeeze(-1)
        self.extras = {extra_name: gathered(extra, source_indices) for extra_name, extra in extras.items()}
        self._keep_rows()
        if self.coding is not None:
            self.coding.pack(self)

    def _keep_rows(self) -> None:
        """Note that all entries have rows of their own."""
        self.packed, self.reserved = True, 0
        self.shared, self.shared_start = [None] * self.batch, [0] * self.batch
        self.forget_bounds()

    def share(self, key: Tensor, value: Tensor, entry_mask: Tensor, reserve: int) -> None:
        """Keep only the chosen entries, and read them where the prefill has them.

        Args:
            key, value: `[1, H, S, d]` and `[1, H, S, d_v]` of the prefill; see `kvbench.engine.shared.can_share`.
            entry_mask: Entries to keep, bool `[B, H, S]`.
            reserve: New entries that may follow; rows for some of them are allocated with the first.
        """
        self.batch, self.heads, _ = entry_mask.shape
        self.shared, self.shared_start = [*shared_entries(key, value, entry_mask)], [0] * self.batch
        self.start, self.length, self.room = ([0] * (self.batch * self.heads) for _ in range(3))
        with torch.inference_mode(False):  # later forwards write to them in any mode
            self.key, self.value = key.new_empty(0, key.shape[-1]), value.new_empty(0, value.shape[-1])
            self.col = torch.empty(0, dtype=torch.int32, device=key.device)
        self.extras, self.packed, self.reserved = {}, True, min(reserve, _OWN_ROWS)
        self.forget_bounds()

    def expect(self, new_count: int) -> None:
        """Reserve rows for new entries that come at once, and some for those behind them, if it has none yet."""
        if self.reserved:
            self.reserved = max(self.reserved, new_count + _OWN_ROWS // 2)

    def materialise(self) -> None:
        """Give shared entries rows of their own: whatever reads or changes rows needs them all."""
        if not self.is_shared:
            return
        assert self.key is not None and self.value is not None
        own_rows, own_counts = self._own_rows(), self.length
        free_counts = [room - length for room, length in zip(self.reserved_room(), own_counts, strict=True)]
        shared_counts = self._shared_counts()
        self.length = self.entry_counts()
        self._layout(free_counts)
        tail_starts = [start + count for start, count in zip(self.start, shared_counts, strict=True)]
        shared_rows = runs(self.start, shared_counts, self.col.device)
        tail_rows = runs(tail_starts, own_counts, self.col.device)
        sharing = [(entries, first) for entries, first in zip(self.shared, self.shared_start, strict=True) if entries]

        def with_shared(own: Tensor, shared: list[Tensor]) -> Tensor:
            with torch.inference_mode(False):
                joined = own.new_zeros(sum(self.room), *own.shape[1:])
            joined[tail_rows], joined[shared_rows] = own[own_rows], torch.cat(shared)
            return joined

        self.key = with_shared(self.key, [entries.key.flatten(0, 2)[entries.rows()] for entries, _ in sharing])
        self.value = with_shared(self.value, [entries.value.flatten(0, 2)[entries.rows()] for entries, _ in sharing])
        self.col = with_shared(self.col, [entries.columns + first for entries, first in sharing])
        self._keep_rows()

    def with_own_rows(self) -> RaggedLayer:
        """Return a layer whose entries all have rows: this one, or a copy if it shares entries."""
        if not self.is_shared:
            return self
        materialised = copy.copy(self)
        materialised.materialise()
        return materialised

    @property
    def is_shared(self) -> bool:
        """Return whether any sequence reads entries of a prefill."""
        return any(entries is not None for entries in self.shared)

    def _shared_counts(self) -> list[int]:
        if self._shared_lengths is None:
            nothing = [0] * self.heads
            lengths = (nothing if entries is None else entries.lengths for entries in self.shared)
            self._shared_lengths = [*chain.from_iterable(lengths)]
        return self._shared_lengths

    def entry_counts(self) -> list[int]:
        """Return the entries of every segment: rows and shared ones."""
        if not self.is_shared:
            return self.length
        return [own + shared for own, shared in zip(self.length, self._shared_counts(), strict=True)]

    def shared_addresses(self) -> Tensor | None:
        """Return where kernels find shared entries, int64 `[B * H, 4]`; None if there are none."""
        if self._addresses is None and self.is_shared:
            nothing = torch.zeros(self.heads, 4, dtype=torch.int64, device=self.col.device)
            self._addresses = torch.cat([nothing if entries is None else entries.addresses for entries in self.shared])
        return self._addresses

    def reserved_room(self) -> list[int]:
        """Return the rows of every segment; a layer without rows will get those it has reserved."""
        return self.room if self.col.shape[0] else [max(self.reserved, room) for room in self.room]

    def append(self, new_tokens: NewTokens) -> None:
        """Store the pending K and V of new tokens behind every segment of a packed layer."""
        key, value = (tensor.detach() for tensor in self.take_pending())
        key = reordered(key, self.order)
        assert self.key is not None and self.value is not None
        tokens = new_tokens.for_segments(self.heads, key.device)
        self.make_room(tokens.counts)
        segment_starts, segment_lengths = self.bounds()
        target_rows = (segment_starts + segment_lengths + tokens.ranks).reshape(-1)
        flat_key, flat_value = key.reshape(-1, self.dim), value.reshape(-1, value.shape[-1])
        if tokens.indices is not None:
            target_rows, flat_key, flat_value = (
                tensor.index_select(0, tokens.indices) for tensor in (target_rows, flat_key, flat_value)
            )
        self._appended = (target_rows, tokens.indices)
        self.key[target_rows] = flat_key
        self.value[target_rows] = flat_value
        self.col[target_rows] = tokens.columns
        for extra in self.extras.values():
            extra[target_rows] = 0
        self.length = [length + added for length, added in zip(self.length, tokens.counts, strict=True)]
        self._bounds = (segment_starts, segment_lengths + tokens.added)

    def evict(
        self, entry_mask: Tensor, sequence_indices: Sequence[int] | None = None, *, keeps_room: bool = False
    ) -> None:
        """Evict entries of a packed layer.

        Args:
            entry_mask: Entries to keep, bool `[B, H, n]`, in the layout of `padded_rows`.
            sequence_indices: Sequences to evict from; None: all.
            keeps_room: As for `pack`.
        """
        row_indices, live_mask = self.padded_rows()
        assert self.key is not None and self.value is not None
        entry_mask = entry_mask & live_mask
        if sequence_indices is not None:
            is_evicted = torch.zeros(self.batch, 1, 1, dtype=torch.bool, device=entry_mask.device)
            is_evicted[list(sequence_indices)] = True
            entry_mask = torch.where(is_evicted, entry_mask, live_mask)
        extras = {extra_name: extra[row_indices] for extra_name, extra in self.extras.items()}
        key, value, coded_counts = self.key, self.value, self.coded
        columns = self.col[row_indices]
        self.pack(key[row_indices], value[row_indices], entry_mask, columns, extras, keeps_room=keeps_room)
        if self.coding is not None and sequence_indices is not None:  # re-encode only the evicted sequences
            other_sequences = [
                sequence_index for sequence_index in range(self.batch) if sequence_index not in sequence_indices
            ]
            for sequence_index in other_sequences:
                segments = slice(sequence_index * self.heads, (sequence_index + 1) * self.heads)
                self.coded[segments] = coded_counts[segments]
            moved_rows, moved_live = self.padded_rows()
            source_rows = row_indices[other_sequences][live_mask[other_sequences]]
            target_rows = moved_rows[other_sequences][moved_live[other_sequences]]
            self.coding.carry(self, key, value, source_rows, target_rows)

    def overwrite(self, row_indices: Tensor, key: Tensor, value: Tensor) -> None:
        """Replace K and V `[m, d]` of some rows, int64 `[m]` (for mergers); key channels are in `order`."""
        assert self.key is not None and self.value is not None
        self.key[row_indices], self.value[row_indices] = key.detach(), value.detach()

    def read(self, row_indices: Tensor, sequence_indices: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return K and V of a packed layer in the model's channel order, `[B, H, n, d]` each.

        Args:
            row_indices: Rows, int64 `[B, H, n]`.
            sequence_indices: Sequences of the rows; None: all.
        """
        assert self.key is not None and self.value is not None
        return restored(self.key[row_indices], self.order_of(sequence_indices)), self.value[row_indices]

    def order_of(self, sequence_indices: Sequence[int] | None) -> Tensor | None:
        """Return the channel order of some sequences, or of all if `sequence_indices` is None."""
        return self.order if self.order is None or sequence_indices is None else self.order[list(sequence_indices)]

    def store_extras(self, extras: Mapping[str, Tensor]) -> None:
        """Store per-entry state, `[B, H, n, ...]` each, in the layout of `padded_rows`."""
        longest = max(self.length)
        first_indices = [segment * longest for segment in range(len(self.length))]
        source_indices, target_rows = runs(first_indices, self.length, self.col.device), self.rows()
        for extra_name, extra in extras.items():
            self.extras[extra_name][target_rows] = extra.detach().flatten(0, 2)[source_indices]

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Return the start and length of every segment on the layer's device, int64 `[B, H, 1]` each.

        They stay on the device between steps, so a decode step copies nothing from the CPU.
        """
        if self._bounds is None:
            bounds_shape = (self.batch, self.heads, 1)
            segment_starts = torch.tensor(self.start, dtype=torch.int64, device=self.col.device)
            segment_lengths = torch.tensor(self.length, dtype=torch.int64, device=self.col.device)
            self._bounds = (segment_starts.view(bounds_shape), segment_lengths.view(bounds_shape))
        return self._bounds

    def accumulate(self, need: Need, received_attention: Tensor) -> None:
        """Add the attention received by live entries, `[entries, G]` in the order of `rows()`."""
        self.extras[need][self.rows()] += received_attention

    def write_new(self, need: Need, values: Tensor) -> None:
        """Store one value per entry of the last append, `[B, H, n]`."""
        target_rows, indices = self._appended
        flat_values = values.detach().reshape(-1)
        self.extras[need][target_rows] = flat_values if indices is None else flat_values[indices]

    def vacate(self, sequence_indices: Sequence[int]) -> None:
        """Let go of all entries of some sequences; their rows stay."""
        for sequence_index in sequence_indices:
            segments = slice(sequence_index * self.heads, (sequence_index + 1) * self.heads)
            self.length[segments] = [0] * self.heads
            self.shared[sequence_index] = None
        bounds, addresses = self._bounds, self._addresses
        self.forget_bounds()
        # Copies, as forks share these: making them from the lists of all sequences takes longer than an append.
        indices = torch.tensor(sequence_indices, device=self.col.device)
        if bounds is not None:
            self._bounds = (bounds[0], bounds[1].index_fill(0, indices, 0))
        if addresses is not None and self.is_shared:
            self._addresses = addresses.unflatten(0, (self.batch, self.heads)).index_fill(0, indices, 0).flatten(0, 1)

    def forget_bounds(self) -> None:
        """Discard the device copy of start and length, and what is shared, after a change on the CPU."""
        self._bounds = self._addresses = self._shared_lengths = None

    def rows(self) -> Tensor:
        """Return the rows of all live entries, segment by segment, int64 `[entries]`."""
        self.materialise()
        return self._own_rows()

    def _own_rows(self) -> Tensor:
        return runs(self.start, self.length, self.col.device)

    def is_like(self, other: RaggedLayer) -> bool:
        """Return whether two layers, both packed or both dense, can be shown as one: sinks are those of one layer."""
        if sinks_of(self.scale) is not None or sinks_of(other.scale) is not None:
            return False
        own, others = (
            (layer.device, layer.dtype, layer.heads, layer.dim, layer.value_dim, layer.scale, cap_of(layer.scale))
            for layer in (self, other)
        )
        return own == others and [*self.extras] == [*other.extras]

    def longest(self, sequence_indices: Sequence[int] | None = None) -> int:
        """Return the entries of the longest segment of some sequences; None: of all."""
        if sequence_indices is None:
            return max(self.length)
        return max(
            max(self.length[sequence_index * self.heads : (sequence_index + 1) * self.heads])
            for sequence_index in sequence_indices
        )

    def padded_rows(
        self, sequence_indices: Sequence[int] | None = None, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of the live entries as a padded tensor.

        Args:
            sequence_indices: Sequences to return; None: all.
            width: Length of the last axis, `n`; None: that of the longest segment of these sequences.

        Returns:
            Row indices int64 `[B, H, n]` (padded with valid rows) and the mask of live entries, bool `[B, H, n]`.
        """
        self.materialise()
        segment_starts, segment_lengths = self.bounds()
        if sequence_indices is not None:
            selected = torch.tensor(sequence_indices, device=self.col.device)
            segment_starts, segment_lengths = segment_starts[selected], segment_lengths[selected]
        if width is None:
            width = self.longest(sequence_indices)
        offsets = torch.arange(width, device=self.col.device)
        live_mask = offsets < segment_lengths
        row_indices = segment_starts + torch.where(live_mask, offsets, 0)
        return row_indices.clamp(max=max(len(self.col) - 1, 0)), live_mask

    def _layout(self, reserved_rows: int | list[int] | None) -> Tensor:
        """Lay out the segments for the current lengths; return the row of every entry."""
        if reserved_rows is None:
            mean_length = sum(self.length) // max(1, len(self.length))
            reserved_rows = min(64, max(8, mean_length // 8))
        if isinstance(reserved_rows, int):
            reserved_rows = [reserved_rows] * len(self.length)
        self.room = [length + reserved for length, reserved in zip(self.length, reserved_rows, strict=True)]
        self.start = starts(self.room)
        self._bounds = None
        return runs(self.start, self.length, self.device)

    def make_room(self, new_counts: Sequence[int]) -> None:
        """Reallocate all rows if any segment is too small for its new entries."""
        if any(
            length + new_count > capacity
            for length, new_count, capacity in zip(self.length, new_counts, self.room, strict=True)
        ):
            self._grow(max(new_counts))

    def _grow(self, new_count: int) -> None:
        source_rows = self._own_rows()
        target_rows = self._layout([max(new_count, 16, self.reserved, length // 8) for length in self.length])
        row_total = sum(self.room)

        def move_rows(tensor: Tensor) -> Tensor:
            with torch.inference_mode(False):
                moved_tensor = tensor.new_zeros(row_total, *tensor.shape[1:])
            moved_tensor[target_rows] = tensor[source_rows]  # quantised rows know no other way
            return moved_tensor

        assert self.key is not None and self.value is not None
        self.key, self.value, self.col = move_rows(self.key), move_rows(self.value), move_rows(self.col)
        self.extras = {extra_name: move_rows(extra) for extra_name, extra in self.extras.items()}

    # -- copies and sizes -------------------------------------------------------------------------
    def fork(self) -> RaggedLayer:
        """Return an independent copy; dense tensors are shared, packed ones are copied."""
        forked = copy.copy(self)
        forked.start, forked.length, forked.room = [*self.start], [*self.length], [*self.room]
        forked.state = [dict(merger_state) for merger_state in self.state]
        forked.shared, forked.shared_start = [*self.shared], [*self.shared_start]
        forked.extras = dict(self.extras)
        if self.packed:
            assert self.key is not None and self.value is not None
            forked.key, forked.value = self.key.clone(), self.value.clone()
            forked.col = self.col.clone()
            forked.extras = {extra_name: extra.clone() for extra_name, extra in self.extras.items()}
        return forked

    def sequence(self, sequence_index: int) -> RaggedLayer:
        """Return one sequence of a packed layer, without per-entry state; memory is shared."""
        assert self.key is not None and self.value is not None
        sequence_layer = copy.copy(self)
        segments = slice(sequence_index * self.heads, (sequence_index + 1) * self.heads)
        first_row = self.start[segments.start]
        sequence_layer.batch, sequence_layer.length, sequence_layer.room = 1, self.length[segments], self.room[segments]
        sequence_layer.start = [segment_start - first_row for segment_start in self.start[segments]]
        sequence_layer.coded, sequence_layer.order = self.coded[segments], self.order_of([sequence_index])
        if self.col.shape[0]:  # cells that share a prefill have no rows yet, and slicing adds up over a grid
            row_slice = slice(first_row, first_row + sum(sequence_layer.room))
            sequence_layer.key = self.key[row_slice]
            sequence_layer.value = self.value[row_slice]
            sequence_layer.col = self.col[row_slice]
        sequence_layer.shared = self.shared[sequence_index : sequence_index + 1]
        sequence_layer.shared_start = self.shared_start[sequence_index : sequence_index + 1]
        sequence_layer.extras, sequence_layer.state = {}, []
        sequence_layer.forget_bounds()
        return sequence_layer

    def among(self, sequence_indices: Sequence[int]) -> RaggedLayer:
        """Return some sequences of a packed layer, without per-entry state; memory is shared."""
        selection = copy.copy(self)
        segments = [
            sequence_index * self.heads + head_index
            for sequence_index in sequence_indices
            for head_index in range(self.heads)
        ]
        selection.start, selection.length, selection.room = (
            [counts[segment] for segment in segments] for counts in (self.start, self.length, self.room)
        )
        selection.shared = [self.shared[sequence_index] for sequence_index in sequence_indices]
        selection.shared_start = [self.shared_start[sequence_index] for sequence_index in sequence_indices]
        selection.batch, selection.extras, selection.state = len(sequence_indices), {}, []
        selection.forget_bounds()
        return selection

    def entries(self, sequence_index: int | None = None) -> int:
        """Count the live entries of one sequence or of all; a dense layer counts its columns."""
        if not self.packed:
            dense_entries = 0 if self.key is None else self.heads * self.key.shape[-2]
            return dense_entries * (self.batch if sequence_index is None else 1)
        sequences, segments = self._parts(sequence_index)
        shared_entries = (entries.count for entries in self.shared[sequences] if entries is not None)
        return sum(self.length[segments]) + sum(shared_entries)

    def _parts(self, sequence_index: int | None) -> tuple[slice, slice]:
        """Return the slices of one sequence, or of all, in lists by sequence and by segment."""
        if sequence_index is None:
            return slice(None), slice(None)
        last_index = sequence_index + 1
        return slice(sequence_index, last_index), slice(sequence_index * self.heads, last_index * self.heads)

    def entries_among(self, marked_columns: Tensor, sequence_index: int) -> Tensor:
        """Count one sequence's live entries whose column is marked in `marked_columns`, bool `[S]`."""
        if not self.packed:
            return self.heads * marked_columns.sum()
        return marked_columns.to(self.col.device)[self.columns_of(sequence_index)[1]].sum()

    def columns_of(self, sequence_index: int) -> tuple[Tensor, Tensor]:
        """Return the KV head and the logical column of every live entry of a sequence, int64 `[entries]` each."""
        sequences, segments = self._parts(sequence_index)
        lengths = [self.length[segments]]
        columns = [self.col[runs(self.start[segments], lengths[0], self.col.device)]]
        for entries, first_column in zip(self.shared[sequences], self.shared_start[sequences], strict=True):
            if entries is not None:
                lengths.append(entries.lengths)
                columns.append(entries.columns + first_column)
        heads = torch.arange(self.heads, device=self.col.device).repeat(len(lengths))
        head_lengths = torch.tensor([length for part in lengths for length in part], device=self.col.device)
        return heads.repeat_interleave(head_lengths), torch.cat(columns).long()

    @property
    def number_bytes(self) -> int:
        """Return the bytes of one element of K or V in the model's dtype."""
        return 0 if self.key is None else self.key.element_size()

    @property
    def entry_numbers(self) -> int:
        """Return the numbers of one entry; latents store the value as a part of the key."""
        return self.dim + (0 if self.is_latent else self.value_dim)

    def entry_bytes(self) -> int:
        """Return the bytes of one entry: K, V and per-entry state."""
        extra_bytes = sum(extra.element_size() * extra[0].numel() for extra in self.extras.values() if len(extra))
        return self.entry_numbers * self.number_bytes + extra_bytes

    def live_bytes(self, sequence_index: int | None = None) -> int:
        """Return the bytes of the live entries of one sequence or of all: K, V and per-entry state."""
        if self.coding is None or not self.packed or self.key is None:
            return self.entries(sequence_index) * self.entry_bytes()
        number_bytes = self.number_bytes
        extra_bytes = self.entries(sequence_index) * (self.entry_bytes() - self.entry_numbers * number_bytes)
        _, segments = self._parts(sequence_index)
        entry_counts = self.length[segments], self.coded[segments]
        return extra_bytes + self.coding.live_bytes(*entry_counts, self.dim, number_bytes)

    def prefill_bytes(self, sequence_index: int | None = None) -> dict[int, int]:
        """Return the bytes of every prefill that one sequence or any reads, by its address."""
        sharing = [entries for entries in self.shared[self._parts(sequence_index)[0]] if entries is not None]
        column_bytes = self.heads * self.entry_numbers * self.number_bytes
        return {entries.key.data_ptr(): entries.key.shape[2] * column_bytes for entries in sharing}

    def allocated_bytes(self, sequence_index: int | None = None) -> int:
        """Return the bytes allocated for one sequence or for all, including free rows, columns and shared prefills."""
        sequences, segments = self._parts(sequence_index)
        shared_bytes = sum(self.prefill_bytes(sequence_index).values())
        sharing = [entries for entries in self.shared[sequences] if entries is not None]
        shared_bytes += sum(entries.count * self.col.element_size() for entries in sharing)
        if sequence_index is not None and self.packed:
            owned_rows = sum(self.reserved_room()[segments])
            if self.coding is not None:
                return self.allocated_bytes() * owned_rows // max(1, len(self.col))
            return owned_rows * (self.entry_bytes() + self.col.element_size()) + shared_bytes
        tensors = [tensor for tensor in (self.key, self.value, self.order) if tensor is not None]
        if self.packed:
            tensors += [self.col, *self.extras.values()]
        return shared_bytes + sum(
            tensor.owned_bytes if isinstance(tensor, Coded) else tensor.numel() * tensor.element_size()
            for tensor in tensors
        )
