"""Carries a compression out: packs a prefill into a cache, cuts packed rows back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import Cut, Decision
from kvbench.engine.layer import RaggedLayer


def cut_cache(cut: Cut, target: RaggedCache, reserve: int | None = None) -> None:
    """Compress all layers of `cut.cache` into `target` (which may be the same cache).

    Args:
        cut: What to do.
        target: Gets the packed layers, the counts and the observers.
        reserve: Rows of room per segment.

    Raises:
        BudgetError: The policy did not meet its budget to the entry.
    """
    full = cut.keeps_all
    layers = list(zip(cut.cache.ragged, target.ragged, strict=True))
    decisions: list[Decision] | None = None
    if not full and not cut.by_layer:
        decisions = cut.model([cut.view(layer, i) for i, (layer, _) in enumerate(layers)])
    for i, (layer, into) in enumerate(layers):
        if decisions is not None:
            decision = decisions[i]
        else:
            view = cut.view(layer, i)
            decision = cut.whole(view) if full else cut.layer(view)
        store(cut, i, layer, into, decision, reserve)
    finish(cut, target)


def store(
    cut: Cut,
    index: int,
    source: RaggedLayer,
    target: RaggedLayer,
    decision: Decision,
    reserve: int | None = None,
) -> None:
    """Pack what was decided for one dense layer.

    Args:
        cut: What it was decided in.
        index: The layer's index among the full-attention layers.
        source: The dense layer.
        target: Gets the entries; may be the same layer.
        decision: What stays.
        reserve: Rows of room per segment.
    """
    assert source.key is not None and source.value is not None
    key = source.key if decision.key is None else decision.key
    value = source.value if decision.value is None else decision.value
    target.seen, target.dim, target.scale = source.seen, source.dim, source.scale
    target.dtype, target.device = source.dtype, source.device
    target.is_initialized = True
    target.state = cut.state_of(index)
    columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
    target.pack(key, value, decision.keep, columns, decision.extras, reserve)


def cut_back(cuts: Sequence[Cut], cache: RaggedCache) -> None:
    """Cut some rows of a packed cache back; the others keep all that they hold.

    Args:
        cuts: With `rows` set, no row in two of them.
        cache: The cache, the `cache` of every cut.

    Raises:
        BudgetError: The policy did not meet its budget to the entry.
    """
    made: list[list[Decision]] = []
    for cut in cuts:
        views = [cut.view(layer, i) for i, layer in enumerate(cache.ragged)]
        made.append([cut.layer(v) for v in views] if cut.by_layer else cut.model(views))
    done = [row for cut in cuts for row in cut.rows or ()]
    for i, layer in enumerate(cache.ragged):
        _, keep = layer.padded_rows()
        layer.state = layer.state or [{} for _ in range(layer.batch)]
        for cut, decisions in zip(cuts, made, strict=True):
            assert cut.rows is not None
            decision, state = decisions[i], cut.state_of(i)
            rows, _ = layer.padded_rows(cut.rows)
            chosen = rows[decision.keep]
            for name, extra in decision.extras.items():
                if isinstance(name, str):  # what is observed on and on is there already
                    layer.extras[name][chosen] = extra[decision.keep]
            if decision.key is not None and decision.value is not None:
                kept = decision.keep
                layer.overwrite(chosen, decision.key[kept], decision.value[kept])
            keep[cut.rows, :, : rows.shape[2]] = decision.keep
            for row, held in zip(cut.rows, state, strict=True):
                layer.state[row] = held
        layer.evict(keep, done)
    cache.budget_entries = [*(cache.budget_entries or [0] * cache.batch)]
    cache.held_entries = [*(cache.held_entries or [0] * cache.batch)]
    for cut in cuts:
        held_now = [cache.live_entries(row) for row in cut.rows or ()]
        cut.check(held_now)
        for row, total, count in zip(cut.rows or (), cut.total, held_now, strict=True):
            cache.budget_entries[row], cache.held_entries[row] = total, count


def finish(cut: Cut, target: RaggedCache) -> None:
    """Record and check what is held after a compression."""
    held = [target.live_entries(row) for row in range(cut.cache.batch)]
    cut.check(held)
    target.budget_entries, target.held_entries = cut.total, held
