"""The decision of one eviction step: score, allocate, select and merge, with an exact entry count."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.eviction_state import goes_on
from kvbench.engine.showing import CachedScores, Flags, ViewBuilder
from kvbench.engine.threads import now
from kvbench.errors import BudgetError
from kvbench.parts import apportion
from kvbench.plugin import (
    AttentionMass,
    Need,
    Queries,
    Scored,
    Scores,
    View,
)
from kvbench.view.shown import LayerNeeded, checked_scores, checked_tensor, repeated

_TOGETHER = 1 << 19
"""Maximum number of attention weights of observed queries in the layers that a policy sees at once.

They should fit into a core's cache.
"""

_COPIED = 1 << 14
"""Maximum number of entries in the layers of a prefill that a policy sees at once.

Their K and V are copied, once for all policies; with more of them, calls no longer take most of the time.
"""


class Decision(NamedTuple):
    """Entries kept in one layer, bool `[B, H, n]`, their per-entry state, and K and V if they changed."""

    keep: Tensor
    extras: dict[str | Need, Tensor]
    key: Tensor | None = None
    value: Tensor | None = None


@dataclass
class EvictionStep(ViewBuilder):
    """One eviction step of one cache for one policy, with one row per budget.

    Attributes:
        states: Merger state of every layer, for the sequences of this step.
    """

    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.total = [head_budget * self.info.layers * self.info.kv_heads for head_budget in self.budget]
        self.by_layer = self.policy.allocate.scope != "model"
        self._flags: list[Flags] = []

    @property
    def at_once(self) -> bool:
        """Return whether a layer can be decided as soon as its own forward has ended."""
        waits_for_end = any(need.of_tokens or need.at_end for need in self.policy.needs)
        return self.by_layer and not waits_for_end

    @cached_property
    def shares(self) -> Tensor:
        """Return the budget of every layer in entries, int64 `[B, L]` (scopes `head` and `layer`).

        At a later step a layer may hold less than its budget; the other layers get the rest.

        Raises:
            BudgetError: The layers' budgets do not sum to the total.
        """
        layer_budgets = self.policy.allocate.shares(self.info, self.length, self.mean).to(torch.int64)
        if layer_budgets.sum(1).tolist() != self.total:
            raise BudgetError(f"{self.policy}: the layers' budgets do not sum to the total budget")
        layer_entries = []
        for layer in self.cache.ragged:
            if layer.packed:
                sequence_indices = range(layer.batch) if self.rows is None else self.rows
                layer_entries.append(
                    torch.tensor([layer.entries(sequence_index) for sequence_index in sequence_indices])
                )
            else:
                layer_entries.append(self.length.cpu() * self.info.kv_heads)
        capacities = torch.stack(layer_entries, 1).to(layer_budgets.device)
        if bool((layer_budgets <= capacities).all()):
            return layer_budgets
        return apportion(layer_budgets.double(), layer_budgets.sum(1), capacities)

    @property
    def keeps_all(self) -> bool:
        """Return whether everything is kept."""
        return not self.policy.evicts or self.budget == self.length.tolist()

    def _extras(self, view: View) -> dict[str | Need, Tensor]:
        """Return the per-entry state to store if another eviction step can follow."""
        if not goes_on(self.policy, self.moment):
            return {}
        extras: dict[str | Need, Tensor] = {}
        extras.update(view.extras)
        for need, observed in view.obs.items():
            if isinstance(need, AttentionMass):
                extras[need] = observed.unflatten(1, (self.info.kv_heads, -1)).transpose(2, 3)
            elif need.goes_on:
                extras[need] = observed
        return extras

    def layer(self, view: View) -> Decision:
        """Decide for one layer (scopes `head` and `layer`)."""
        layer_indices = [view.layer]
        (decision,) = self._by_layer(layer_indices, self._prepared(view, layer_indices))
        self.untouched()
        return decision

    def decisions(self) -> Iterator[Decision]:
        """Decide for all layers, where the allocator permits it when the earlier ones have been taken.

        Layers of one shape are shown together, as far as they are small and no part reads which layer it sees: most
        of the time goes into calls. How many are small depends on nothing but the sequences of this step, and so do
        the bits of its decisions.
        """
        groups = (self._scored(layer_indices) for layer_indices in self._groups())
        if not self.by_layer:
            yield from self._by_model([*chain.from_iterable(groups)])
            return
        for group in groups:
            decisions = [decision for scored in group for decision in self._by_layer(*scored)]
            self.untouched()
            yield from decisions

    def _scored(self, layer_indices: list[int]) -> list[tuple[Sequence[int], Scored]]:
        """Score layers together, or one by one if the score reads which layer it sees."""
        if len(layer_indices) == 1:
            return [(layer_indices, self._prepared(self.several(layer_indices), layer_indices))]
        try:
            view = self.several(layer_indices)
        except LayerNeeded:
            return [
                ([layer_index], self._prepared(self.several([layer_index]), [layer_index]))
                for layer_index in layer_indices
            ]
        extras = {name: extra.clone() for name, extra in view.extras.items()}  # a score may write to them
        try:
            return [(layer_indices, self._prepared(view, layer_indices))]
        except LayerNeeded:
            view.extras = extras
            return [
                ([layer_index], self._prepared(view.of_layer(layer_index, own), [layer_index]))
                for layer_index, own in view.places()
            ]

    def _by_layer(self, layer_indices: Sequence[int], scored: Scored) -> list[Decision]:
        layer_budgets = self._in_rows(self.shares[:, layer_indices]).to(scored.view.col.device)
        try:
            head_budgets = self._allocated([scored], layer_budgets)[:, 0]
        except LayerNeeded:
            singles = self._singles(layer_indices, scored)
            return [decision for group in singles for decision in self._by_layer(*group)]
        return self._select(layer_indices, scored, head_budgets)

    def _allocated(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Return the entries of every head, `[B, len(layers), H]`."""
        result = self.policy.allocate.allocate(layers, total)
        shape = (len(total), len(layers), self.info.kv_heads)
        return checked_tensor("allocator", result, shape, "int64 [B, layers, H]", (torch.int64, torch.int32))

    def _by_model(self, groups: Sequence[tuple[Sequence[int], Scored]]) -> list[Decision]:
        total_budgets = torch.tensor(self.total, device=self.length.device)
        singles = [scored for group in groups for _, scored in self._singles(*group)]
        head_budgets = self._allocated(_gathered(singles, total_budgets.device), total_budgets)
        decisions = [
            decision
            for layer_indices, scored in groups
            for decision in self._select(
                layer_indices,
                scored,
                self._in_rows(head_budgets[:, layer_indices]).to(scored.view.col.device),
            )
        ]
        self.untouched()
        return decisions

    def _singles(self, layer_indices: Sequence[int], scored: Scored) -> list[tuple[Sequence[int], Scored]]:
        """Split views and scores into those of single layers."""
        if len(layer_indices) == 1:
            return [(layer_indices, scored)]
        view, scores = scored
        return [
            ([layer_index], Scored(view.of_layer(layer_index, own), Scores(scores.value[own], scores.protect[own])))
            for layer_index, own in view.places()
        ]

    def _in_rows(self, by_layer: Tensor) -> Tensor:
        """Return values of sequences and layers, `[B, L, ...]`, in the order of `View.places`, `[B * L, ...]`."""
        return (by_layer if self.spread else by_layer.transpose(0, 1)).flatten(0, 1)

    def _groups(self) -> Iterator[list[int]]:
        """Group neighbouring layers that can be shown together."""
        window = max([1, *(need.window for need in self.policy.needs if isinstance(need, Queries))])
        group: list[int] = []
        size = 0
        weights_of_entry = len(self.budget) * self.info.query_heads * window
        for layer_index, layer in enumerate(self.cache.ragged):
            limit, layer_size = _COPIED, layer.entries()
            if layer.packed:
                limit, layer_size = _TOGETHER, weights_of_entry * layer.longest(self.rows)
            if group and (not layer.is_like(self.cache.ragged[group[0]]) or size + layer_size > limit):
                yield group
                group, size = [], 0
            group.append(layer_index)
            size += layer_size
        yield group

    def keep_everything(self, view: View) -> Decision:
        """Keep everything in one layer; the policy still initialises its per-entry state."""
        if self.policy.score is not None and self.policy.score.extras:
            self._score(view, (view.layer,))
        self.untouched()
        return Decision(view.valid.expand(len(self.budget), -1, -1), self._extras(view))

    def check(self, entry_counts: list[int]) -> None:
        """Compare the held entries with the budget and read the collected error flags.

        The flags are read once per step, because reading one makes a GPU wait.

        Args:
            entry_counts: Entries of every sequence of this step over all layers and heads.

        Raises:
            BudgetError: The counts differ, a score is not finite, or a selector did not keep exactly its budget.
        """
        if self._flags:
            device = self.length.device
            messages = [message for flags in self._flags for message in flags.messages]
            is_wrong = torch.cat([flags.errors.to(device) for flags in self._flags]).tolist()
            if any(is_wrong):
                raise BudgetError(f"{self.policy}: {messages[is_wrong.index(True)]}")
        for sequence, entry_count in enumerate(entry_counts):
            if entry_count != self.total[sequence]:
                raise BudgetError(
                    f"{self.policy} holds {entry_count} entries where its budget of "
                    f"{self.budget[sequence]} per head allows exactly {self.total[sequence]}"
                )

    def _prepared(self, view: View, layer_indices: Sequence[int]) -> Scored:
        """Score a view of some layers; with several budgets, repeat view and scores once per budget."""
        scores = self._score(view, layer_indices)
        if self.spread:
            budgets = self.mean.to(view.col.device)
            if view.read_budget:
                others = self._score(view.for_budgets(budgets[1:]), layer_indices)
                scores = Scores(torch.cat([scores.value, others.value]), torch.cat([scores.protect, others.protect]))
            else:
                scores = Scores(*(repeated(tensor, len(budgets)) for tensor in (scores.value, scores.protect)))
            view = view.for_budgets(budgets)
        return Scored(view, self.policy.select.prepare(view, scores))

    def _score(self, view: View, layer_indices: Sequence[int]) -> Scores:
        score = self.policy.score
        assert score is not None
        cache_key = tuple(layer_indices), score
        cached = None if self.shared is None else self.shared.scores.get(cache_key)
        if cached is not None:
            view.extras = {extra_name: extra.clone() for extra_name, extra in cached.extras.items()}
            self.saved += cached.seconds
            self._flags.append(cached.flags)
            return self._shown_scores(_copied(cached.scores))
        started = now(view.col.device)
        try:
            returned = checked_scores(score.score(view), view)
        except BudgetError as error:
            raise BudgetError(f"{self.policy}: {error}") from error
        scores = Scores(returned.value.float(), returned.protect)
        is_wrong = ~scores.value.isfinite() & view.valid
        flags = self._flagged("a score of layer {} is not finite", is_wrong, layer_indices)
        is_of_one_budget = len(view.length) == self.cache.batch * len(layer_indices)
        if self.shared is not None and not view.read_budget and is_of_one_budget:
            self._check_changes()  # before another attempt finds these scores
            seconds = now(view.col.device) - started
            self.shared_seconds += seconds
            # A selector may write to its scores, so give it copies.
            extras = {extra_name: extra.clone() for extra_name, extra in view.extras.items()}
            cached_scores = CachedScores(_copied(scores), extras, seconds, flags)
            self.shared.scores[cache_key] = cached_scores
        return self._shown_scores(scores)

    def _shown_scores(self, scores: Scores) -> Scores:
        """Record the scores passed to the other parts of the policy."""
        self._changes.show("scores", scores.value)
        self._changes.show("protect", scores.protect)
        return scores

    def _select(self, layer_indices: Sequence[int], scored: Scored, head_budgets: Tensor) -> list[Decision]:
        """Select and merge the entries of some layers; return one decision per layer."""
        view, scores = scored
        try:
            # A selector may write to its scores.
            own_scores = scores if len(layer_indices) == 1 else _copied(scores)
            selected = self.policy.select.select(view, own_scores, head_budgets)
            entry_mask = checked_tensor("selector", selected, view.shape, "bool [B, H, n]", (torch.bool,))
            is_wrong = (entry_mask & ~view.valid).any(-1) | (entry_mask.sum(-1) != head_budgets)
            message = "in layer {} the selector did not keep exactly each head's budget"
            self._flagged(message, is_wrong, layer_indices)
            key, value = self._merged(view, entry_mask, layer_indices)
        except LayerNeeded:
            places = zip(self._singles(layer_indices, scored), view.places(), strict=True)
            return [decision for group, (_, own) in places for decision in self._select(*group, head_budgets[own])]
        extras = self._extras(view)
        return [
            Decision(
                entry_mask[own, :, :width],
                {name: extra[own, :, :width] for name, extra in extras.items()},
                None if key is None else key[own, :, :width],
                None if value is None else value[own, :, :width],
            )
            for layer_index, own in view.places()
            for layer in [self.cache.ragged[layer_index]]
            for width in [layer.longest(self.rows) if layer.packed else None]
        ]

    def _flagged(self, message: str, is_wrong: Tensor, layer_indices: Sequence[int]) -> Flags:
        """Collect and return flags of some layers, where `is_wrong` is bool `[layers * B, ...]`."""
        if self.spread:
            is_wrong = is_wrong.unflatten(0, (-1, len(layer_indices))).transpose(0, 1)
        errors = is_wrong.reshape(len(layer_indices), -1).any(-1)
        flags = Flags([message.format(layer_index) for layer_index in layer_indices], errors)
        self._flags.append(flags)
        return flags

    def _merged(
        self, view: View, entry_mask: Tensor, layer_indices: Sequence[int]
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self.policy.merge is None:
            return None, None
        sequence_states: list[dict[str, Tensor]] = []
        for layer_index in layer_indices:
            layer_states = self.cache.ragged[layer_index].state
            chosen = self.rows is not None and layer_states
            sequence_states += [layer_states[row] for row in self.rows or ()] if chosen else layer_states
        if len(layer_indices) > 1 and len({_shape_of(state) for state in sequence_states}) > 1:
            raise LayerNeeded
        state_names = sequence_states[0] if sequence_states else ()
        state = {
            state_name: torch.cat([sequence_state[state_name] for sequence_state in sequence_states])
            for state_name in state_names
        }
        merged = self.policy.merge.merge(view, entry_mask, state)
        shapes = [getattr(tensor, "shape", None) for tensor in merged] if isinstance(merged, tuple) else []
        if len(shapes) != 2 or any(shape is None or shape[:-1] != view.shape for shape in shapes):
            what = " and ".join(str(shape and list(shape)) for shape in shapes) or type(merged).__name__
            raise BudgetError(f"the merger returned {what}; return keys and values, {[*view.shape, 'd']} each")
        for layer_index, own in view.places():
            self.states[layer_index] = {state_name: tensor[own] for state_name, tensor in state.items()}
        return merged

    def state_of(self, layer_index: int) -> list[dict[str, Tensor]]:
        """Return the merger state of a layer, one item per sequence of this step."""
        state = self.states.get(layer_index, {})
        sequence_indices = range(len(self.budget))
        return [
            {state_name: tensor[sequence_index : sequence_index + 1] for state_name, tensor in state.items()}
            for sequence_index in sequence_indices
        ]


def _shape_of(state: Mapping[str, Tensor]) -> frozenset[object]:
    """Return what the merger states of two layers must have in common to be joined."""
    return frozenset((name, tensor.shape[1:], tensor.dtype) for name, tensor in state.items())


def _copied(scores: Scores) -> Scores:
    return Scores(scores.value.clone(), scores.protect.clone())


def _gathered(scored: list[Scored], device: torch.device) -> list[Scored]:
    """Move the scores and views of all layers, without keys and values, to one device."""
    if all(scored_layer.view.col.device == device for scored_layer in scored):
        return scored
    gathered = []
    for view, scores in scored:
        moved_view = copy.copy(view)
        moved_view.length, moved_view.col, moved_view.position = (
            tensor.to(device) for tensor in (view.length, view.col, view.position)
        )
        moved_view.valid, moved_view.seed = view.valid.to(device), view.seed.to(device)
        moved_view.obs = {need: tensor.to(device) for need, tensor in view.obs.items()}
        moved_view.extras = {extra_name: tensor.to(device) for extra_name, tensor in view.extras.items()}
        moved_scores = Scores(scores.value.to(device), scores.protect.to(device))
        gathered.append(Scored(moved_view, moved_scores))
    return gathered
