"""Eviction: packs a prefill, evicts from packed caches, and maintains their eviction state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.channels import channel_order, reordered
from kvbench.engine.codes import Coding
from kvbench.engine.decide import Decision, EvictionStep
from kvbench.engine.eviction_state import EvictionState, goes_on, spare_entries
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.reading import readings
from kvbench.engine.shared import can_share
from kvbench.engine.threads import now
from kvbench.errors import UserError
from kvbench.plugin import ModelInfo, Policy


def compress_cache(
    eviction_step: EvictionStep, target_cache: RaggedCache, reserve: int | None = None, *, shares: bool = False
) -> None:
    """Compress all layers of `eviction_step.cache` into `target_cache`, possibly the same cache.

    Args:
        target_cache: Receives the packed layers and the counts.
        reserve: Free rows behind every segment.
        shares: Whether entries are read in the dense layers where possible, not copied; they must not change then.

    Raises:
        BudgetError: The policy did not keep exactly its budget.
    """
    layers = list(zip(eviction_step.cache.ragged, target_cache.ragged, strict=True))
    decisions = _decisions(eviction_step)
    for layer_index, ((source_layer, target_layer), decision) in enumerate(zip(layers, decisions, strict=True)):
        pack_layer(eviction_step, layer_index, source_layer, target_layer, decision, reserve, shares=shares)
    record_counts([eviction_step], target_cache)


def compress_together(
    steps: Sequence[EvictionStep], target_cache: RaggedCache, reserve: int | None = None, *, shares: bool = False
) -> list[float]:
    """Compress one cache in several ways, with one packing per layer for all of them.

    Args:
        steps: Eviction steps on the same cache that store entries unchanged, without per-entry state. Their budgets
            become the sequences of `target_cache`, in this order.
        target_cache: Receives the packed layers and the counts.
        reserve: Free rows behind every segment.
        shares: As in `compress_cache`.

    Returns:
        Decision time of each step in seconds.

    Raises:
        BudgetError: A policy did not keep exactly its budget.
    """
    entry_masks: list[list[Tensor]] = []
    seconds: list[float] = []
    for step in steps:
        started = now(step.seeds.device)
        entry_masks.append([decision.keep for decision in _decisions(step)])
        seconds.append(now(step.seeds.device) - started)
    layers = zip(steps[0].cache.ragged, target_cache.ragged, zip(*entry_masks, strict=True), strict=True)
    for source_layer, target_layer, layer_masks in layers:
        target_layer.state = [{} for step in steps for _ in step.budget]
        _pack(source_layer, target_layer, Decision(torch.cat(layer_masks), {}), reserve, shares=shares)
    record_counts(steps, target_cache)
    return seconds


def _decisions(eviction_step: EvictionStep) -> Iterator[Decision]:
    """Decide for every layer of a prefill."""
    if eviction_step.keeps_all:
        layers = list(enumerate(eviction_step.cache.ragged))
        return (eviction_step.keep_everything(eviction_step.view(layer, layer_index)) for layer_index, layer in layers)
    return eviction_step.decisions()


def _pack(
    source_layer: RaggedLayer, target_layer: RaggedLayer, decision: Decision, reserve: int | None, *, shares: bool
) -> None:
    """Pack the kept entries of a dense layer; without K and V in the decision, use the layer's."""
    assert source_layer.key is not None and source_layer.value is not None
    key = source_layer.key if decision.key is None else decision.key
    value = source_layer.value if decision.value is None else decision.value
    target_layer.seen, target_layer.scale = source_layer.seen, source_layer.scale
    target_layer.dim, target_layer.value_dim = source_layer.dim, source_layer.value_dim
    target_layer.is_latent = source_layer.is_latent
    target_layer.dtype, target_layer.device = source_layer.dtype, source_layer.device
    target_layer.is_initialized = True
    if shares and reserve is not None and can_share(key, value, source_layer.scale):
        target_layer.share(key, value, decision.keep, reserve)
        return
    columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
    target_layer.pack(key, value, decision.keep, columns, decision.extras, reserve)


def pack_layer(
    eviction_step: EvictionStep,
    layer_index: int,
    source_layer: RaggedLayer,
    target_layer: RaggedLayer,
    decision: Decision,
    reserve: int | None = None,
    *,
    shares: bool = False,
) -> None:
    """Pack the kept entries of one dense layer.

    Args:
        eviction_step: The eviction step of the decision.
        layer_index: Index of the layer among the full-attention layers.
        source_layer: The dense layer.
        target_layer: Receives the entries; can be the same layer.
        decision: Entries to keep.
        reserve: Free rows behind every segment.
        shares: As in `compress_cache`.
    """
    target_layer.state = eviction_step.state_of(layer_index)
    target_layer.coding = Coding.of(eviction_step.policy)
    if target_layer.coding is not None and source_layer.dim != source_layer.value_dim:
        raise UserError(
            f"{eviction_step.policy} stores entries in another format, which needs keys and values of the same size; "
            "this model's differ"
        )
    if eviction_step.policy.key_channels < 1:
        assert target_layer.coding is not None and source_layer.key is not None
        key = source_layer.key if decision.key is None else decision.key
        channel_count = target_layer.coding.width(source_layer.dim)
        target_layer.order = channel_order(
            eviction_step.channel_queries(layer_index), key, decision.keep, channel_count
        )
        decision = decision._replace(key=reordered(key, target_layer.order))
    _pack(source_layer, target_layer, decision, reserve, shares=shares)


def record_counts(eviction_steps: Sequence[EvictionStep], target_cache: RaggedCache) -> None:
    """Record and check the number of entries held after compression.

    Args:
        eviction_steps: The eviction steps, in the order of the sequences of `target_cache`.
        target_cache: The compressed cache.

    Raises:
        BudgetError: A policy did not keep exactly its budget.
    """
    target_cache.budget_entries, target_cache.held_entries = [], []
    for eviction_step in eviction_steps:
        first_sequence = len(target_cache.held_entries)
        entry_counts = [
            target_cache.live_entries(first_sequence + sequence_index)
            for sequence_index in range(len(eviction_step.budget))
        ]
        eviction_step.check(entry_counts)
        target_cache.budget_entries += eviction_step.total
        target_cache.held_entries += entry_counts


# --- later eviction steps ------------------------------------------------------------------------


def start_eviction_state(eviction_step: EvictionStep, cache: RaggedCache, budget: list[int]) -> None:
    """Set up the eviction state of a newly packed cache; free what only the prefill needed.

    Args:
        eviction_step: The first eviction step.
        budget: Mean entries per (layer, head) after later steps, per sequence; with a reader, the entries a query
            reads.
    """
    policy = eviction_step.policy
    if eviction_step.moment != "turns":  # nothing is evicted before the first turn, which reads everything
        read_few(cache, policy, eviction_step.info, budget)
    if not goes_on(policy, eviction_step.moment):
        cache.observers, cache.token_observers = {}, {}
        return
    cache.eviction_state = EvictionState(policy, eviction_step.info, eviction_step.moment, budget, eviction_step.seeds)
    cache.observers = {
        need: observer for need, observer in cache.observers.items() if need in policy.needs and not need.per_entry
    }
    cache.token_observers = {need: observer for need, observer in cache.token_observers.items() if need in policy.needs}


def read_few(cache: RaggedCache, policy: Policy, info: ModelInfo, budget: Sequence[int]) -> None:
    """Limit what queries of a packed cache read to their budget, if the policy has a reader.

    Args:
        budget: Entries a query reads per (layer, KV head), for every sequence.
    """
    cache.readings = readings(policy, info, budget)
    if cache.readings:
        entry_counts = [cache.live_entries(sequence_index) for sequence_index in range(cache.batch)]
        for reading, entry_count in zip(cache.readings, entry_counts, strict=True):
            reading.check(entry_count // (info.layers * info.kv_heads))
        cache.budget_entries = [
            min(reading.total, entry_count) for reading, entry_count in zip(cache.readings, entry_counts, strict=True)
        ]


def after_forward(cache: RaggedCache, column_count: int) -> None:
    """Evict from the sequences that are due after a forward.

    Args:
        cache: A cache with decode-time eviction state.
        column_count: Columns of the forward. A prefill chunk has more than one.
    """
    eviction_state = cache.eviction_state
    assert eviction_state is not None
    if eviction_state.moment == "decode":
        spare_total = eviction_state.heads * spare_entries(eviction_state.policy, eviction_state.moment)
        due_sequences = [
            sequence_number
            for sequence_number in range(cache.batch)
            if cache.live_entries(sequence_number)
            >= eviction_state.heads * eviction_state.budget[sequence_number] + spare_total
        ]
        if due_sequences:
            evict_sequences(cache, due_sequences)
    elif eviction_state.moment == "chunked" and column_count > 1:
        restore(cache, range(cache.batch))


def record_peaks(cache: RaggedCache, sequence_indices: Iterable[int]) -> None:
    """Record the sizes of sequences that grow. They are largest just before an eviction and at the end."""
    eviction_state = cache.eviction_state
    assert eviction_state is not None
    for index in sequence_indices:
        eviction_state.peak[index] = max(eviction_state.peak[index], cache.live_entries(index))
        eviction_state.live[index] = max(eviction_state.live[index], cache.live_bytes(index))
        eviction_state.room[index] = max(eviction_state.room[index], cache.allocated_bytes(index))


def restore(cache: RaggedCache, sequence_indices: Iterable[int]) -> None:
    """Evict from the given sequences that exceed their budget."""
    eviction_state = cache.eviction_state
    if eviction_state is None:
        return
    due_sequences = [
        sequence_index
        for sequence_index in sequence_indices
        if cache.live_entries(sequence_index) > eviction_state.heads * eviction_state.budget[sequence_index]
    ]
    if due_sequences:
        evict_sequences(cache, due_sequences)


def evict_sequences(cache: RaggedCache, sequence_indices: Sequence[int]) -> None:
    """Evict from sequences of a packed cache down to their budgets; the others keep all entries.

    Raises:
        BudgetError: The policy did not keep exactly its budget.
    """
    eviction_state = cache.eviction_state
    assert eviction_state is not None
    record_peaks(cache, sequence_indices)
    started = now(eviction_state.seeds.device)
    # On a CPU, process every sequence alone, so that results do not depend on the batch bit by bit.
    evicts_singly = cache.valid is not None and cache.valid.device.type == "cpu"
    sequence_groups = (
        [[sequence_index] for sequence_index in sequence_indices]
        if evicts_singly
        else _by_merger_state(cache, sequence_indices)
    )
    _evict_groups(
        [
            EvictionStep(
                eviction_state.policy,
                cache,
                eviction_state.info,
                eviction_state.moment,
                [eviction_state.budget[sequence_number] for sequence_number in sequence_group],
                eviction_state.seeds,
                rows=sequence_group,
                final=eviction_state.final,
                coming=eviction_state.coming,
            )
            for sequence_group in sequence_groups
        ],
        cache,
    )
    eviction_state.seconds += now(eviction_state.seeds.device) - started


def _by_merger_state(cache: RaggedCache, sequence_indices: Sequence[int]) -> list[list[int]]:
    """Group sequences by whether they had an eviction step before: only then does a merger have state."""
    merger_states = cache.ragged[0].state
    started_rows = [
        sequence_number for sequence_number in sequence_indices if merger_states and merger_states[sequence_number]
    ]
    fresh_rows = [
        sequence_number
        for sequence_number in sequence_indices
        if not (merger_states and merger_states[sequence_number])
    ]
    return [sequence_group for sequence_group in (started_rows, fresh_rows) if sequence_group]


def _evict_groups(eviction_steps: Sequence[EvictionStep], cache: RaggedCache) -> None:
    """Run the eviction steps of disjoint groups of sequences in one packing per layer."""
    step_decisions = [[*eviction_step.decisions()] for eviction_step in eviction_steps]
    keeps_room = eviction_steps[0].moment == "decode"  # after a chunk or a turn, other numbers of entries follow
    evicted_rows = [sequence_index for eviction_step in eviction_steps for sequence_index in eviction_step.rows or ()]
    for layer_index, layer in enumerate(cache.ragged):
        _, layer_mask = layer.padded_rows()
        layer.state = layer.state or [{} for _ in range(layer.batch)]
        for eviction_step, decisions in zip(eviction_steps, step_decisions, strict=True):
            assert eviction_step.rows is not None
            decision, merger_states = decisions[layer_index], eviction_step.state_of(layer_index)
            row_indices = eviction_step.row_indices[layer_index][..., : decision.keep.shape[2]]
            kept_rows = row_indices[decision.keep]
            for extra_name, extra in decision.extras.items():
                if isinstance(extra_name, str):  # the layer already holds ongoing observations
                    layer.extras[extra_name][kept_rows] = extra[decision.keep]
            if decision.key is not None and decision.value is not None:
                entry_mask = decision.keep
                key = reordered(decision.key, layer.order_of(eviction_step.rows))
                layer.overwrite(kept_rows, key[entry_mask], decision.value[entry_mask])
            layer_mask[eviction_step.rows, :, : row_indices.shape[2]] = decision.keep
            for sequence_index, merger_state in zip(eviction_step.rows, merger_states, strict=True):
                layer.state[sequence_index] = merger_state
        layer.evict(layer_mask, evicted_rows, keeps_room=keeps_room)
    cache.budget_entries = [*(cache.budget_entries or [0] * cache.batch)]
    cache.held_entries = [*(cache.held_entries or [0] * cache.batch)]
    for eviction_step in eviction_steps:
        entry_counts = [cache.live_entries(sequence_index) for sequence_index in eviction_step.rows or ()]
        eviction_step.check(entry_counts)
        for sequence_index, entry_budget, entry_count in zip(
            eviction_step.rows or (), eviction_step.total, entry_counts, strict=True
        ):
            cache.budget_entries[sequence_index], cache.held_entries[sequence_index] = entry_budget, entry_count
