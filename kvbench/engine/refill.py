"""Replacement of sequences in a packed batch: new sequences take the rows of those that left.

A row keeps its memory when its sequence leaves, and gets more only if a larger one needs it. No function here handles
per-entry state or sliding windows: call `detach_state` on caches first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.engine.cache import RaggedCache
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import starts


def vacant(reference: RaggedCache, row_count: int) -> RaggedCache:
    """Return a packed cache of empty rows without memory, for the same model."""
    assert reference.valid is not None
    vacant_cache = _derived(reference, lambda layer: _vacant(layer, row_count))
    vacant_cache.valid = torch.zeros(row_count, 0, dtype=torch.bool, device=reference.valid.device)
    vacant_cache.shift = torch.zeros(row_count, dtype=torch.int64, device=reference.valid.device)
    return vacant_cache


def extended(cache: RaggedCache, row_count: int) -> RaggedCache:
    """Return the same packed cache with empty rows without memory appended."""
    assert cache.valid is not None and cache.shift is not None
    added_rows = row_count - cache.batch
    extended_cache = _derived(cache, lambda layer: _extended(layer, added_rows))
    extended_cache.valid = pad(cache.valid, (0, 0, 0, added_rows))
    extended_cache.shift = pad(cache.shift, (0, added_rows))
    extended_cache.padded = extended_cache.padded or added_rows > 0
    return extended_cache


def picked(cache: RaggedCache, row_indices: Sequence[int]) -> RaggedCache:
    """Return some sequences of a packed cache, in ascending order; the others' memory is freed."""
    return _selected(cache, row_indices, lambda layer: _picked(layer, row_indices))


def shrunk(cache: RaggedCache, row_indices: Sequence[int]) -> RaggedCache:
    """Return some sequences of a packed cache, in ascending order; nothing else may use the cache afterwards.

    Entries move, and the others' memory is freed, only once that is the larger part of it.
    """

    def shrunk_layer(layer: RaggedLayer) -> RaggedLayer:
        kept_layer = layer.among(row_indices)
        return kept_layer if 2 * sum(kept_layer.room) >= len(layer.col) else _picked(layer, row_indices)

    return _selected(cache, row_indices, shrunk_layer)


def among(cache: RaggedCache, row_indices: Sequence[int], token_counts: Sequence[int]) -> RaggedCache:
    """Return some sequences of a packed cache, sharing its memory, to feed tokens to them alone.

    Nothing else may use the cache until `absorb` has taken the tokens over.

    Args:
        token_counts: Number of tokens to feed to each of them.
    """
    new_tokens = [0] * cache.batch
    for row_index, token_count in zip(row_indices, token_counts, strict=True):
        new_tokens[row_index] = token_count
    for layer in cache.ragged:
        layer.make_room([token_count for token_count in new_tokens for _ in range(layer.heads)])
    return _selected(cache, row_indices, lambda layer: layer.among(row_indices))


def absorb(cache: RaggedCache, row_indices: Sequence[int], fed_cache: RaggedCache) -> None:
    """Take over the tokens fed to the result of `among`; the columns of the other sequences shift."""
    assert cache.valid is not None and fed_cache.valid is not None
    added_columns = fed_cache.get_seq_length() - cache.get_seq_length()
    cache.valid = pad(cache.valid, (added_columns, 0))
    cache.valid[list(row_indices)] = fed_cache.valid
    cache.padded = not bool(cache.valid.all())
    others = _neighbours(sorted(set(range(cache.batch)) - set(row_indices)))
    for layer, fed_layer in zip(cache.ragged, fed_cache.ragged, strict=True):
        layer.seen = fed_layer.seen
        first_entries = [*layer.start[:: layer.heads], len(layer.col)]
        for rows in others:
            layer.col[first_entries[rows[0]] : first_entries[rows[-1] + 1]] += added_columns
            for row_index in rows:
                layer.shared_start[row_index] += added_columns
        for fed_index, row_index in enumerate(row_indices):
            fed_segments = slice(fed_index * layer.heads, (fed_index + 1) * layer.heads)
            layer.length[row_index * layer.heads : (row_index + 1) * layer.heads] = fed_layer.length[fed_segments]
        layer.forget_bounds()


def vacate(cache: RaggedCache, row_indices: Sequence[int]) -> None:
    """Remove some sequences; their memory stays for others."""
    assert cache.valid is not None
    cache.valid[list(row_indices)] = False
    for layer in cache.ragged:
        layer.vacate(row_indices)


def vacancies(cache: RaggedCache, free_rows: Sequence[int], caches: Sequence[RaggedCache]) -> list[int]:
    """Choose a vacant row for each cache, preferably one with enough memory.

    Args:
        cache: The cache with the rows.
        free_rows: The vacant rows, at least as many as caches.
        caches: Packed caches of one sequence each.
    """
    capacities = _owned(cache.ragged[0])
    remaining = set(free_rows)
    selected_rows = [-1] * len(caches)
    required = [sum(source_cache.ragged[0].reserved_room()) for source_cache in caches]
    for cache_index in sorted(
        range(len(caches)), key=lambda cache_index: -required[cache_index]
    ):  # largest cache first
        fitting_rows = [row_index for row_index in remaining if capacities[row_index] >= required[cache_index]]
        if fitting_rows:
            selected_rows[cache_index] = min(fitting_rows, key=lambda row_index: (capacities[row_index], row_index))
        else:
            selected_rows[cache_index] = max(remaining, key=lambda row_index: (capacities[row_index], -row_index))
        remaining.remove(selected_rows[cache_index])
    return selected_rows


def fill_rows(cache: RaggedCache, row_indices: Sequence[int], caches: Sequence[RaggedCache]) -> None:
    """Copy sequences into vacant rows; all columns shift so that the sequences end together.

    Args:
        cache: Receives the sequences.
        row_indices: Rows freed by `vacate` or created by `vacant`.
        caches: Packed caches of one sequence each.
    """
    token_mask, new_masks = _live(cache), [_live(source_cache) for source_cache in caches]
    column_count = max(new_mask.shape[1] for new_mask in (token_mask, *new_masks))
    placed_mask = pad(token_mask, (column_count - token_mask.shape[1], 0))
    for row_index, new_mask in zip(row_indices, new_masks, strict=True):
        placed_mask[row_index] = pad(new_mask[0], (column_count - new_mask.shape[1], 0))
    column_shift, *column_shifts = [column_count - source_cache.get_seq_length() for source_cache in (cache, *caches)]
    cache.valid, cache.padded = placed_mask, not bool(placed_mask.all())
    assert cache.shift is not None
    cache.shift = cache.shift.clone()
    cache.shift[list(row_indices)] = torch.cat(
        [source_cache.shift for source_cache in caches if source_cache.shift is not None]
    )
    layer_groups = zip(*(source_cache.ragged for source_cache in caches), strict=True)
    for layer, source_layers in zip(cache.ragged, layer_groups, strict=True):
        layer.seen = column_count
        layer.col += column_shift
        layer.shared_start = [first_column + column_shift for first_column in layer.shared_start]
        _fill_rows(layer, row_indices, source_layers, column_shifts)


def _derived(cache: RaggedCache, change_layer: Callable[[RaggedLayer], RaggedLayer]) -> RaggedCache:
    """Return a cache of the same model with other layers."""
    derived_cache = copy.copy(cache)
    derived_cache.layers = [change_layer(layer) for layer in cache.ragged]
    assert len(derived_cache.layers) == len(cache.layers)
    derived_cache.visual = None
    derived_cache.ids = None
    derived_cache.turns = []
    derived_cache.budget_entries = None
    derived_cache.held_entries = None
    derived_cache.detach_state()
    return derived_cache


def _selected(
    cache: RaggedCache, row_indices: Sequence[int], change_layer: Callable[[RaggedLayer], RaggedLayer]
) -> RaggedCache:
    """Return a cache of some sequences, whose layers `change_layer` makes."""
    assert cache.valid is not None and cache.shift is not None
    selection = _derived(cache, change_layer)
    selection.valid, selection.shift = cache.valid[list(row_indices)], cache.shift[list(row_indices)]
    return selection


def _live(cache: RaggedCache) -> Tensor:
    """Return a copy of `valid` without the columns before the first token of any sequence."""
    assert cache.valid is not None
    has_token = cache.valid.any(0)
    first_column = int(has_token.long().argmax()) if bool(has_token.any()) else len(has_token)
    return cache.valid[:, first_column:].clone()


def _vacant(layer: RaggedLayer, row_count: int) -> RaggedLayer:
    assert layer.key is not None and layer.value is not None
    vacant_layer = copy.copy(layer)
    vacant_layer.batch, vacant_layer.seen = row_count, 0
    vacant_layer.key, vacant_layer.value, vacant_layer.col = layer.key[:0], layer.value[:0], layer.col[:0]
    vacant_layer.start, vacant_layer.length, vacant_layer.room = ([0] * (row_count * layer.heads) for _ in range(3))
    vacant_layer.shared, vacant_layer.shared_start, vacant_layer.reserved = [None] * row_count, [0] * row_count, 0
    vacant_layer.forget_bounds()
    return vacant_layer


def _extended(layer: RaggedLayer, added_rows: int) -> RaggedLayer:
    extended_layer = copy.copy(layer)
    empty_segments = [0] * (added_rows * layer.heads)
    extended_layer.batch = layer.batch + added_rows
    extended_layer.start = [*layer.start, *[len(layer.col)] * len(empty_segments)]
    extended_layer.length, extended_layer.room = [*layer.length, *empty_segments], [*layer.room, *empty_segments]
    extended_layer.shared = [*layer.shared, *[None] * added_rows]
    extended_layer.shared_start = [*layer.shared_start, *[0] * added_rows]
    extended_layer.forget_bounds()
    return extended_layer


def _picked(layer: RaggedLayer, row_indices: Sequence[int]) -> RaggedLayer:
    picked_layer = layer.among(row_indices)
    heads, rooms = layer.heads, picked_layer.room
    spans = [
        (first_entry, first_entry + sum(rooms[place * heads : (place + 1) * heads]))
        for place, first_entry in enumerate(picked_layer.start[::heads])
    ]
    picked_layer.start = starts(rooms)

    def move_rows(tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):  # later forwards write to it in any mode
            moved_tensor = tensor.new_empty(sum(rooms), *tensor.shape[1:])
        return torch.cat([tensor[first_entry:end] for first_entry, end in spans], out=moved_tensor)

    assert layer.key is not None and layer.value is not None
    picked_layer.key = move_rows(layer.key)
    picked_layer.value = move_rows(layer.value)
    picked_layer.col = move_rows(layer.col)
    return picked_layer


def _fill_rows(
    layer: RaggedLayer,
    row_indices: Sequence[int],
    source_layers: Sequence[RaggedLayer],
    shifts: Sequence[int],
) -> None:
    """Copy layers of one sequence each into vacant rows; add `shifts` to their columns."""
    rooms = [source_layer.reserved_room() for source_layer in source_layers]
    # Rows in a prefill own little memory. Those still vacant get as much, so that nothing moves when they are filled.
    spare = min(map(sum, rooms)) if all(source_layer.is_shared for source_layer in source_layers) else 0
    _widen(layer, {row_index: sum(room) for row_index, room in zip(row_indices, rooms, strict=True)}, spare)
    assert layer.key is not None and layer.value is not None
    for row_index, source_layer, room, column_shift in zip(row_indices, source_layers, rooms, shifts, strict=True):
        assert source_layer.key is not None and source_layer.value is not None
        segments = slice(row_index * layer.heads, (row_index + 1) * layer.heads)
        first_entry = layer.start[segments.start]
        if row_count := source_layer.col.shape[0]:
            target_rows = slice(first_entry, first_entry + row_count)
            layer.key[target_rows], layer.value[target_rows] = source_layer.key, source_layer.value
            torch.add(source_layer.col, column_shift, out=layer.col[target_rows])
        layer.start[segments] = [first_entry + segment_start for segment_start in starts(room)]
        layer.length[segments], layer.room[segments] = source_layer.length, room
        layer.shared[row_index] = source_layer.shared[0]
        layer.shared_start[row_index] = source_layer.shared_start[0] + column_shift
    layer.forget_bounds()


def _widen(layer: RaggedLayer, required: Mapping[int, int], spare: int) -> None:
    """Ensure a minimum capacity of rows; if one is too small, everything moves, and rows without memory get `spare`."""
    first_entries, capacities = layer.start[:: layer.heads], _owned(layer)
    if all(capacities[row_index] >= capacity for row_index, capacity in required.items()):
        return
    new_capacities = [
        max(capacity or spare, required.get(row_index, 0)) for row_index, capacity in enumerate(capacities)
    ]
    row_starts = starts(new_capacities)
    # Rows without entries, such as those to fill, need not move; the others keep their capacity, so
    # that neighbours move together.
    lengths = [sum(layer.length[first : first + layer.heads]) for first in range(0, len(layer.length), layer.heads)]
    used_rows = [row_index for row_index, length in enumerate(lengths) if length]
    spans = [
        (first_entries[rows[0]], row_starts[rows[0]], sum(capacities[row_index] for row_index in rows))
        for rows in _neighbours(used_rows)
    ]

    def move_rows(tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):  # later forwards write to it in any mode
            moved_tensor = tensor.new_empty(sum(new_capacities), *tensor.shape[1:])
        for old_start, new_start, count in spans:
            moved_tensor[new_start : new_start + count] = tensor[old_start : old_start + count]
        return moved_tensor

    assert layer.key is not None and layer.value is not None
    layer.key, layer.value, layer.col = move_rows(layer.key), move_rows(layer.value), move_rows(layer.col)
    for segment_index, segment_start in enumerate(layer.start):
        row_index = segment_index // layer.heads
        layer.start[segment_index] = segment_start - first_entries[row_index] + row_starts[row_index]


def _neighbours(rows: Sequence[int]) -> list[list[int]]:
    """Group ascending rows that follow each other."""
    by_distance = groupby(enumerate(rows), key=lambda place: place[1] - place[0])
    return [[row for _, row in places] for _, places in by_distance]


def _owned(layer: RaggedLayer) -> list[int]:
    """Return the capacity of every sequence in entries."""
    return [row_end - row_start for row_start, row_end in pairwise([*layer.start[:: layer.heads], len(layer.col)])]
