"""Carries compressions out: packs a prefill, cuts packed caches back, and keeps their state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.channels import channel_order, reordered
from kvbench.engine.clock import now
from kvbench.engine.codes import Coding
from kvbench.engine.decide import Cut, Decision
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.reading import readings
from kvbench.engine.upkeep import Upkeep, goes_on, spare
from kvbench.plugin import ModelInfo, Policy


def compress_cache(cut: Cut, target: RaggedCache, reserve: int | None = None) -> None:
    """Compress all layers of `cut.cache` into `target`, which can be the same cache.

    Args:
        cut: What to do.
        target: Receives the packed layers and the counts.
        reserve: Free rows behind every segment.

    Raises:
        BudgetError: The policy did not keep exactly its budget.
    """
    layers = list(zip(cut.cache.ragged, target.ragged, strict=True))
    decisions = _decisions(cut)
    for i, ((layer, into), decision) in enumerate(zip(layers, decisions, strict=True)):
        pack_layer(cut, i, layer, into, decision, reserve)
    record_counts([cut], target)


def compress_together(
    cuts: Sequence[Cut], target: RaggedCache, reserve: int | None = None
) -> list[float]:
    """Compress one cache in several ways, with one packing per layer for all of them.

    Args:
        cuts: What to do: compressions of the same cache that store entries as they are, without
            per-entry state. Their budgets become the sequences of `target`, in this order.
        target: Receives the packed layers and the counts.
        reserve: Free rows behind every segment.

    Returns:
        The seconds that every cut took to decide.

    Raises:
        BudgetError: A policy did not keep exactly its budget.
    """
    made: list[list[Tensor]] = []
    seconds: list[float] = []
    for cut in cuts:
        began = now(cut.seeds.device)
        made.append([decision.keep for decision in _decisions(cut)])
        seconds.append(now(cut.seeds.device) - began)
    layers = zip(cuts[0].cache.ragged, target.ragged, zip(*made, strict=True), strict=True)
    for source, into, keeps in layers:
        into.state = [{} for cut in cuts for _ in cut.budget]
        _pack(source, into, Decision(torch.cat(keeps), {}), reserve)
    record_counts(cuts, target)
    return seconds


def _decisions(cut: Cut) -> Iterator[Decision]:
    """Decide for every layer, one after the other where the policy's shares allow it."""
    layers = list(enumerate(cut.cache.ragged))
    if cut.keeps_all:
        yield from (cut.whole(cut.view(layer, i)) for i, layer in layers)
    elif cut.by_layer:
        yield from (cut.layer(cut.view(layer, i)) for i, layer in layers)
    else:
        yield from cut.model([cut.view(layer, i) for i, layer in layers])


def _pack(source: RaggedLayer, target: RaggedLayer, kept: Decision, reserve: int | None) -> None:
    """Pack what is kept of a dense layer; a decision without K and V takes the layer's."""
    assert source.key is not None and source.value is not None
    key = source.key if kept.key is None else kept.key
    value = source.value if kept.value is None else kept.value
    target.seen, target.dim, target.scale = source.seen, source.dim, source.scale
    target.dtype, target.device = source.dtype, source.device
    target.is_initialized = True
    columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
    target.pack(key, value, kept.keep, columns, kept.extras, reserve)


def pack_layer(
    cut: Cut,
    index: int,
    source: RaggedLayer,
    target: RaggedLayer,
    decision: Decision,
    reserve: int | None = None,
) -> None:
    """Pack the entries of one dense layer that a decision keeps.

    Args:
        cut: The compression that the decision belongs to.
        index: Index of the layer among the full-attention layers.
        source: The dense layer.
        target: Receives the entries; can be the same layer.
        decision: What to keep.
        reserve: Free rows behind every segment.
    """
    target.state = cut.state_of(index)
    target.coding = Coding.of(cut.policy)
    if cut.policy.key_channels < 1:
        assert target.coding is not None and source.key is not None
        key = source.key if decision.key is None else decision.key
        width = target.coding.width(source.dim)
        target.order = channel_order(cut.channel_queries(index), key, decision.keep, width)
        decision = decision._replace(key=reordered(key, target.order))
    _pack(source, target, decision, reserve)


def record_counts(cuts: Sequence[Cut], target: RaggedCache) -> None:
    """Record how many entries are held after compressions, and check the numbers.

    Args:
        cuts: The compressions; the sequences of `target` are theirs in this order.
        target: What they have made.

    Raises:
        BudgetError: A policy did not keep exactly its budget.
    """
    target.budget_entries, target.held_entries = [], []
    for cut in cuts:
        first = len(target.held_entries)
        held = [target.live_entries(first + row) for row in range(len(cut.budget))]
        cut.check(held)
        target.budget_entries += cut.total
        target.held_entries += held


# --- between cuts ---------------------------------------------------------------------------------


def start_upkeep(cut: Cut, cache: RaggedCache, budget: list[int]) -> None:
    """Set up what a newly packed cache needs between cuts; free what only the prefill needed.

    Args:
        cut: The first compression.
        cache: The packed cache.
        budget: Mean entries per (layer, head) that later cuts leave, for every sequence; with a
            reader, the entries that a query reads.
    """
    policy = cut.policy
    if cut.moment != "turns":  # the first turn reads everything, as nothing is cut before it
        read_few(cache, policy, cut.info, budget)
    if not goes_on(policy, cut.moment):
        cache.observers, cache.token_observers = {}, {}
        return
    held = [cache.live_entries(row) for row in range(cache.batch)]
    live = [cache.live_bytes(row) for row in range(cache.batch)]
    cache.upkeep = Upkeep(policy, cut.info, cut.moment, budget, cut.seeds, peak=held, live=live)
    cache.observers = {
        need: observer
        for need, observer in cache.observers.items()
        if need in policy.needs and not need.per_entry
    }
    cache.token_observers = {
        need: observer for need, observer in cache.token_observers.items() if need in policy.needs
    }


def read_few(cache: RaggedCache, policy: Policy, info: ModelInfo, budget: Sequence[int]) -> None:
    """Let the queries of a packed cache read only their budget, if the policy has a reader.

    Args:
        cache: The packed cache.
        policy: Its policy.
        info: The model.
        budget: Entries that a query reads of each (layer, KV head), for every sequence.
    """
    cache.readings = readings(policy, info, budget)
    if cache.readings:
        held = [cache.live_entries(row) for row in range(cache.batch)]
        for how, n in zip(cache.readings, held, strict=True):
            how.check(n // (info.layers * info.kv_heads))
        cache.budget_entries = [
            min(how.total, n) for how, n in zip(cache.readings, held, strict=True)
        ]


def after_forward(cache: RaggedCache, tokens: int) -> None:
    """Note what a cache holds after a forward, and cut the sequences that are due.

    Args:
        cache: A cache with an upkeep.
        tokens: Columns of the forward. A chunk of a prefill has more than one.
    """
    upkeep = cache.upkeep
    assert upkeep is not None
    held = [cache.live_entries(row) for row in range(cache.batch)]
    upkeep.peak = [max(p, h) for p, h in zip(upkeep.peak, held, strict=True)]
    live = [cache.live_bytes(row) for row in range(cache.batch)]
    upkeep.live = [max(p, h) for p, h in zip(upkeep.live, live, strict=True)]
    taken = [cache.allocated_bytes(row) for row in range(cache.batch)]
    upkeep.room = [max(p, h) for p, h in zip(upkeep.room or taken, taken, strict=True)]
    if upkeep.moment == "decode":
        least = upkeep.heads * spare(upkeep.policy, upkeep.moment)
        due = [r for r, h in enumerate(held) if h >= upkeep.heads * upkeep.budget[r] + least]
        if due:
            cut_back(cache, due)
    elif upkeep.moment == "chunked" and tokens > 1:
        restore(cache, range(cache.batch))


def restore(cache: RaggedCache, rows: Iterable[int]) -> None:
    """Cut back the given sequences that hold more than their budget."""
    upkeep = cache.upkeep
    if upkeep is None:
        return
    due = [row for row in rows if cache.live_entries(row) > upkeep.heads * upkeep.budget[row]]
    if due:
        cut_back(cache, due)


def cut_back(cache: RaggedCache, rows: Sequence[int]) -> None:
    """Cut sequences of a packed cache back to their budgets; the others keep all entries.

    Raises:
        BudgetError: The policy did not keep exactly its budget.
    """
    upkeep = cache.upkeep
    assert upkeep is not None
    began = now(upkeep.seeds.device)
    # On a CPU every sequence is cut alone, so that its bits do not depend on its batch.
    alone = cache.valid is not None and cache.valid.device.type == "cpu"
    groups = [[row] for row in rows] if alone else _by_merger_state(cache, rows)
    _cut_groups(
        [
            Cut(
                upkeep.policy,
                cache,
                upkeep.info,
                upkeep.moment,
                [upkeep.budget[r] for r in group],
                upkeep.seeds,
                rows=group,
                final=upkeep.final,
                coming=upkeep.coming,
            )
            for group in groups
        ],
        cache,
    )
    upkeep.seconds += now(upkeep.seeds.device) - began


def _by_merger_state(cache: RaggedCache, rows: Sequence[int]) -> list[list[int]]:
    """Group sequences by whether they were cut before: only then does a merger have state."""
    state = cache.ragged[0].state
    begun = [r for r in rows if state and state[r]]
    fresh = [r for r in rows if not (state and state[r])]
    return [group for group in (begun, fresh) if group]


def _cut_groups(cuts: Sequence[Cut], cache: RaggedCache) -> None:
    """Carry out cuts of disjoint groups of sequences in one packing per layer."""
    made: list[list[Decision]] = []
    for cut in cuts:
        views = [cut.view(layer, i) for i, layer in enumerate(cache.ragged)]
        made.append([cut.layer(v) for v in views] if cut.by_layer else cut.model(views))
    cut_rows = [row for cut in cuts for row in cut.rows or ()]
    for i, layer in enumerate(cache.ragged):
        _, keep = layer.padded_rows()
        layer.state = layer.state or [{} for _ in range(layer.batch)]
        for cut, decisions in zip(cuts, made, strict=True):
            assert cut.rows is not None
            decision, state = decisions[i], cut.state_of(i)
            rows, _ = layer.padded_rows(cut.rows)
            chosen = rows[decision.keep]
            for name, extra in decision.extras.items():
                if isinstance(name, str):  # ongoing observations are in the layer already
                    layer.extras[name][chosen] = extra[decision.keep]
            if decision.key is not None and decision.value is not None:
                kept = decision.keep
                key = reordered(decision.key, layer.order_of(cut.rows))
                layer.overwrite(chosen, key[kept], decision.value[kept])
            keep[cut.rows, :, : rows.shape[2]] = decision.keep
            for row, held_state in zip(cut.rows, state, strict=True):
                layer.state[row] = held_state
        layer.evict(keep, cut_rows)
    cache.budget_entries = [*(cache.budget_entries or [0] * cache.batch)]
    cache.held_entries = [*(cache.held_entries or [0] * cache.batch)]
    for cut in cuts:
        held_now = [cache.live_entries(row) for row in cut.rows or ()]
        cut.check(held_now)
        for row, total, count in zip(cut.rows or (), cut.total, held_now, strict=True):
            cache.budget_entries[row], cache.held_entries[row] = total, count
