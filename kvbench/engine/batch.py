"""Caches of single sequences put together into one batch, and taken apart again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvbench.engine.cache import RaggedCache
from kvbench.engine.layer import RaggedLayer


def stack(caches: Sequence[RaggedCache]) -> RaggedCache:
    """Put packed caches side by side as the rows of one; shorter ones are padded on the left.

    Args:
        caches: Packed caches of the same model; they are not changed.

    Returns:
        A cache with the rows of all, in order.
    """
    out = copy.copy(caches[0])
    valids = [c.valid for c in caches if c.valid is not None]
    seen = max(v.shape[1] for v in valids)
    shifts = [seen - v.shape[1] for v in valids]
    rows = [torch.nn.functional.pad(v, (s, 0)) for v, s in zip(valids, shifts, strict=True)]
    out.valid = torch.cat(rows)
    out.padded = any(s > 0 for s in shifts) or any(c.padded for c in caches)
    out.ids, out.observers = None, {}
    out.budget_entries = [n for c in caches for n in (c.budget_entries or [])]
    out.held_entries = [n for c in caches for n in (c.held_entries or [])]
    layers: list[Any] = []
    for parts in zip(*(c.layers for c in caches), strict=True):
        ragged = [p for p in parts if isinstance(p, RaggedLayer)]
        layers.append(_ragged(ragged, shifts, seen) if ragged else _sliding(list(parts), seen))
    out.layers = layers
    return out


def take(cache: RaggedCache, rows: Sequence[int]) -> RaggedCache:
    """Give a cache of some rows of a packed cache, in the given order."""
    assert cache.valid is not None
    out = copy.copy(cache)
    index = torch.tensor(rows, device=cache.valid.device)
    out.valid = cache.valid[index]
    out.ids, out.observers = None, {}
    out.budget_entries = [cache.budget_entries[r] for r in rows] if cache.budget_entries else None
    out.held_entries = [cache.held_entries[r] for r in rows] if cache.held_entries else None
    layers: list[Any] = []
    for layer in cache.layers:
        part: Any = copy.copy(layer)
        if isinstance(layer, RaggedLayer):
            assert layer.key is not None and layer.value is not None
            segments = [r * layer.heads + h for r in rows for h in range(layer.heads)]
            source = layer.rows_of(
                [layer.start[s] for s in segments], [layer.room[s] for s in segments]
            )
            part.batch = len(rows)
            part.key, part.value = layer.key[source], layer.value[source]
            part.col = layer.col[source]
            part.extras = {name: x[source] for name, x in layer.extras.items()}
            part.room = [layer.room[s] for s in segments]
            part.length = [layer.length[s] for s in segments]
            part.start = _starts(part.room)
        elif part.is_initialized:
            part.keys, part.values = part.keys[index], part.values[index]
        layers.append(part)
    out.layers = layers
    return out


def _starts(room: list[int]) -> list[int]:
    start = [0] * len(room)
    for s in range(1, len(room)):
        start[s] = start[s - 1] + room[s - 1]
    return start


def _ragged(parts: list[RaggedLayer], shifts: list[int], seen: int) -> RaggedLayer:
    out = copy.copy(parts[0])
    out.batch = sum(p.batch for p in parts)
    out.seen = seen
    out.state = {}
    out.key = torch.cat([p.key for p in parts if p.key is not None])
    out.value = torch.cat([p.value for p in parts if p.value is not None])
    out.col = torch.cat([p.col + s for p, s in zip(parts, shifts, strict=True)])
    common = set.intersection(*(set(p.extras) for p in parts))
    out.extras = {name: torch.cat([p.extras[name] for p in parts]) for name in sorted(common)}
    out.room = [n for p in parts for n in p.room]
    out.length = [n for p in parts for n in p.length]
    out.start = _starts(out.room)
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
