"""Rows of a packed batch that come and go: sequences are placed where others have left.

A row keeps its memory when its sequence leaves, and gets more only if a larger one needs it. No
function here handles per-entry state or sliding windows: caches must be settled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.engine.cache import RaggedCache
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import starts


def vacant(like: RaggedCache, rows: int) -> RaggedCache:
    """A packed cache of rows that hold nothing and own no memory, for the same model."""
    assert like.valid is not None
    out = _derived(like, lambda layer: _vacant(layer, rows))
    out.valid = torch.zeros(rows, 0, dtype=torch.bool, device=like.valid.device)
    out.shift = torch.zeros(rows, dtype=torch.int64, device=like.valid.device)
    return out


def extended(cache: RaggedCache, rows: int) -> RaggedCache:
    """The same packed cache with vacant rows behind its own, which own no memory."""
    assert cache.valid is not None and cache.shift is not None
    more = rows - cache.batch
    out = _derived(cache, lambda layer: _extended(layer, more))
    out.valid, out.shift = pad(cache.valid, (0, 0, 0, more)), pad(cache.shift, (0, more))
    out.padded = out.padded or more > 0
    return out


def picked(cache: RaggedCache, rows: Sequence[int]) -> RaggedCache:
    """Some sequences of a packed cache, in ascending order; what the others own is freed."""
    assert cache.valid is not None and cache.shift is not None
    out = _derived(cache, lambda layer: _picked(layer, rows))
    out.valid, out.shift = cache.valid[list(rows)], cache.shift[list(rows)]
    return out


def among(cache: RaggedCache, rows: Sequence[int], new: Sequence[int]) -> RaggedCache:
    """Some sequences of a packed cache, which share its memory, to feed tokens to them alone.

    Nothing else may use the cache until `absorb` has taken the tokens over.

    Args:
        cache: The cache.
        rows: The sequences.
        new: Tokens that each of them will be fed.
    """
    assert cache.valid is not None and cache.shift is not None
    coming = [0] * cache.batch
    for row, count in zip(rows, new, strict=True):
        coming[row] = count
    for layer in cache.ragged:
        layer.make_room([count for count in coming for _ in range(layer.heads)])
    out = _derived(cache, lambda layer: layer.among(rows))
    out.valid, out.shift = cache.valid[list(rows)], cache.shift[list(rows)]
    return out


def absorb(cache: RaggedCache, rows: Sequence[int], fed: RaggedCache) -> None:
    """Take over the tokens that `among` was fed; the columns of the other sequences move."""
    assert cache.valid is not None and fed.valid is not None
    added = fed.get_seq_length() - cache.get_seq_length()
    cache.valid = pad(cache.valid, (added, 0))
    cache.valid[list(rows)] = fed.valid
    cache.padded = not bool(cache.valid.all())
    others = sorted(set(range(cache.batch)) - set(rows))
    for layer, other in zip(cache.ragged, fed.ragged, strict=True):
        layer.seen = other.seen
        first = [*layer.start[:: layer.heads], len(layer.col)]
        for row in others:
            layer.col[first[row] : first[row + 1]] += added
        for i, row in enumerate(rows):
            own = slice(i * layer.heads, (i + 1) * layer.heads)
            layer.length[row * layer.heads : (row + 1) * layer.heads] = other.length[own]
        layer.forget_bounds()


def vacate(cache: RaggedCache, row: int) -> None:
    """Forget one sequence; its memory waits for another."""
    assert cache.valid is not None
    cache.valid[row] = False
    for layer in cache.ragged:
        layer.length[row * layer.heads : (row + 1) * layer.heads] = [0] * layer.heads
        layer.forget_bounds()


def vacancies(cache: RaggedCache, free: Sequence[int], caches: Sequence[RaggedCache]) -> list[int]:
    """Choose a vacant row for each cache: one that owns enough memory, if there is one.

    Args:
        cache: Where the rows are.
        free: The vacant rows, at least as many as caches.
        caches: Packed caches of one sequence each.
    """
    owned = _owned(cache.ragged[0])
    left = set(free)
    rows = [-1] * len(caches)
    needs = [sum(other.ragged[0].room) for other in caches]
    for i in sorted(range(len(caches)), key=lambda i: -needs[i]):  # the largest cache first
        fitting = [row for row in left if owned[row] >= needs[i]]
        if fitting:
            rows[i] = min(fitting, key=lambda row: (owned[row], row))
        else:
            rows[i] = max(left, key=lambda row: (owned[row], -row))
        left.remove(rows[i])
    return rows


def place(cache: RaggedCache, rows: Sequence[int], caches: Sequence[RaggedCache]) -> None:
    """Copy sequences into vacant rows; the columns of all move so that they end together.

    Args:
        cache: Receives them.
        rows: The rows; `vacate` or `vacant` made them free.
        caches: Packed caches of one sequence each.
    """
    own, new = _live(cache), [_live(c) for c in caches]
    width = max(v.shape[1] for v in (own, *new))
    valid = pad(own, (width - own.shape[1], 0))
    for row, v in zip(rows, new, strict=True):
        valid[row] = pad(v[0], (width - v.shape[1], 0))
    shift, *shifts = [width - c.get_seq_length() for c in (cache, *caches)]
    cache.valid, cache.padded = valid, not bool(valid.all())
    assert cache.shift is not None
    cache.shift = cache.shift.clone()
    cache.shift[list(rows)] = torch.cat([c.shift for c in caches if c.shift is not None])
    parts = zip(*(c.ragged for c in caches), strict=True)
    for layer, others in zip(cache.ragged, parts, strict=True):
        layer.seen = width
        layer.col += shift
        _place(layer, rows, others, shifts)


def _derived(cache: RaggedCache, change: Callable[[RaggedLayer], RaggedLayer]) -> RaggedCache:
    """A cache of the same model with other layers."""
    out = copy.copy(cache)
    out.layers = [change(layer) for layer in cache.ragged]
    assert len(out.layers) == len(cache.layers)
    out.visual = None
    out.ids, out.turns, out.budget_entries, out.held_entries = None, [], None, None
    out.settle()
    return out


def _live(cache: RaggedCache) -> Tensor:
    """`valid` without the columns before the first token of any sequence; a copy."""
    assert cache.valid is not None
    any_token = cache.valid.any(0)
    first = int(any_token.long().argmax()) if bool(any_token.any()) else len(any_token)
    return cache.valid[:, first:].clone()


def _vacant(layer: RaggedLayer, rows: int) -> RaggedLayer:
    assert layer.key is not None and layer.value is not None
    out = copy.copy(layer)
    out.batch, out.seen = rows, 0
    out.key, out.value, out.col = layer.key[:0], layer.value[:0], layer.col[:0]
    out.start, out.length, out.room = ([0] * (rows * layer.heads) for _ in range(3))
    out.forget_bounds()
    return out


def _extended(layer: RaggedLayer, more: int) -> RaggedLayer:
    out = copy.copy(layer)
    empty = [0] * (more * layer.heads)
    out.batch = layer.batch + more
    out.start = [*layer.start, *[len(layer.col)] * len(empty)]
    out.length, out.room = [*layer.length, *empty], [*layer.room, *empty]
    out.forget_bounds()
    return out


def _picked(layer: RaggedLayer, rows: Sequence[int]) -> RaggedLayer:
    first, owned = layer.start[:: layer.heads], _owned(layer)
    begin = starts([owned[row] for row in rows])
    out = layer.among(rows)
    out.start = [
        s - first[rows[i // layer.heads]] + begin[i // layer.heads] for i, s in enumerate(out.start)
    ]

    def moved(x: Tensor) -> Tensor:
        with torch.inference_mode(False):  # later forwards write to it in any mode
            out = x.new_empty(sum(owned[row] for row in rows), *x.shape[1:])
        return torch.cat([x[first[row] : first[row] + owned[row]] for row in rows], out=out)

    assert layer.key is not None and layer.value is not None
    out.key, out.value, out.col = moved(layer.key), moved(layer.value), moved(layer.col)
    return out


def _place(
    layer: RaggedLayer, rows: Sequence[int], others: Sequence[RaggedLayer], shifts: Sequence[int]
) -> None:
    """Copy layers of one sequence each into vacant rows; `shifts` are added to their columns."""
    _widen(layer, {row: sum(other.room) for row, other in zip(rows, others, strict=True)})
    assert layer.key is not None and layer.value is not None
    for row, other, shift in zip(rows, others, shifts, strict=True):
        assert other.key is not None and other.value is not None
        here = slice(row * layer.heads, (row + 1) * layer.heads)
        first = layer.start[here.start]
        into = slice(first, first + len(other.col))
        layer.key[into], layer.value[into] = other.key, other.value
        layer.col[into] = other.col + shift
        layer.start[here] = [first + s for s in other.start]
        layer.length[here], layer.room[here] = other.length, other.room
    layer.forget_bounds()


def _widen(layer: RaggedLayer, need: Mapping[int, int]) -> None:
    """Give rows at least so much memory; everything moves if one has too little."""
    first, owned = layer.start[:: layer.heads], _owned(layer)
    wanted = [max(n, need.get(row, 0)) for row, n in enumerate(owned)]
    if wanted == owned:
        return
    begin = starts(wanted)

    def moved(x: Tensor) -> Tensor:
        with torch.inference_mode(False):  # later forwards write to it in any mode
            out = x.new_empty(sum(wanted), *x.shape[1:])
        for part, at in zip(x.split(owned), begin, strict=True):
            out[at : at + len(part)] = part
        return out

    assert layer.key is not None and layer.value is not None
    layer.key, layer.value, layer.col = moved(layer.key), moved(layer.value), moved(layer.col)
    for s, at in enumerate(layer.start):
        row = s // layer.heads
        layer.start[s] = at - first[row] + begin[row]


def _owned(layer: RaggedLayer) -> list[int]:
    """Entries that the memory of every sequence can hold."""
    return [b - a for a, b in pairwise([*layer.start[:: layer.heads], len(layer.col)])]
