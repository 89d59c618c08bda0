"""The decision of one eviction step: score, allocate, select and merge, with an exact entry count."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.eviction_state import goes_on
from kvbench.engine.showing import CachedScores, ViewBuilder
from kvbench.engine.threads import now
from kvbench.errors import BudgetError
from kvbench.parts import apportion
from kvbench.plugin import (
    AttentionMass,
    Need,
    Scored,
    Scores,
    View,
)
from kvbench.view.shown import checked_scores


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
        self._flags: list[tuple[str, Tensor]] = []

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
        view, scores = self._prepared(view)
        layer_budgets = self.shares[:, view.layer].to(view.col.device)
        head_budgets = self.policy.allocate.allocate([Scored(view, scores)], layer_budgets)
        decision = self._select(view, scores, head_budgets[:, 0])
        self.untouched()
        return decision

    def model(self, views: list[View]) -> list[Decision]:
        """Decide for all layers together (scope `model`)."""
        scored = [self._prepared(layer_view) for layer_view in views]
        total_budgets = torch.tensor(self.total, device=self.length.device)
        head_budgets = self.policy.allocate.allocate(_gathered(scored, total_budgets.device), total_budgets)
        layer_choices = zip(scored, head_budgets.unbind(1), strict=True)
        decisions = [
            self._select(layer_view, layer_scores, layer_budgets.to(layer_view.col.device))
            for (layer_view, layer_scores), layer_budgets in layer_choices
        ]
        self.untouched()
        return decisions

    def keep_everything(self, view: View) -> Decision:
        """Keep everything in one layer; the policy still initialises its per-entry state."""
        if self.policy.score is not None and self.policy.score.extras:
            self._score(view)
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
            flag_values = torch.stack([flag.to(device) for _, flag in self._flags]).tolist()
            for (message, _), is_wrong in zip(self._flags, flag_values, strict=True):
                if is_wrong:
                    raise BudgetError(f"{self.policy}: {message}")
        for sequence, entry_count in enumerate(entry_counts):
            if entry_count != self.total[sequence]:
                raise BudgetError(
                    f"{self.policy} holds {entry_count} entries where its budget of "
                    f"{self.budget[sequence]} per head allows exactly {self.total[sequence]}"
                )

    def _prepared(self, view: View) -> Scored:
        """Score one layer; with several budgets, repeat view and scores once per budget."""
        scores = self._score(view)
        if self.spread:
            budgets = self.mean.to(view.col.device)
            if view.read_budget:
                others = self._score(view.for_budgets(budgets[1:]))
                scores = Scores(torch.cat([scores.value, others.value]), torch.cat([scores.protect, others.protect]))
            else:
                scores = Scores(*(x.expand(len(budgets), -1, -1) for x in (scores.value, scores.protect)))
            view = view.for_budgets(budgets)
        return Scored(view, self.policy.select.prepare(view, scores))

    def _score(self, view: View) -> Scores:
        score = self.policy.score
        assert score is not None
        cached = None if self.shared is None else self.shared.scores.get((view.layer, score))
        if cached is not None:
            view.extras = {extra_name: extra.clone() for extra_name, extra in cached.extras.items()}
            self.saved += cached.seconds
            self._flags.append(cached.flag)
            return self._shown_scores(_copied(cached.scores))
        started = now(view.col.device)
        try:
            returned = checked_scores(score.score(view), view)
        except BudgetError as error:
            raise BudgetError(f"{self.policy}: {error}") from error
        scores = Scores(returned.value.float(), returned.protect)
        all_finite = (scores.value.isfinite() | ~view.valid).all()
        flag = (f"a score of layer {view.layer} is not finite", ~all_finite)
        self._flags.append(flag)
        if self.shared is not None and not view.read_budget and len(view.length) == self.cache.batch:
            seconds = now(view.col.device) - started
            self.shared_seconds += seconds
            # A selector may write to its scores, so give it copies.
            extras = {extra_name: extra.clone() for extra_name, extra in view.extras.items()}
            cached_scores = CachedScores(_copied(scores), extras, seconds, flag)
            self.shared.scores[view.layer, score] = cached_scores
        return self._shown_scores(scores)

    def _shown_scores(self, scores: Scores) -> Scores:
        """Record the scores passed to the other parts of the policy."""
        self._changes.show("scores", scores.value)
        self._changes.show("protect", scores.protect)
        return scores

    def _select(self, view: View, scores: Scores, head_budgets: Tensor) -> Decision:
        entry_mask = self.policy.select.select(view, scores, head_budgets)
        is_wrong = (entry_mask & ~view.valid).any() | (entry_mask.sum(-1) != head_budgets).any()
        message = f"in layer {view.layer} the selector did not keep exactly each head's budget"
        self._flags.append((message, is_wrong))
        if self.policy.merge is None:
            return Decision(entry_mask, self._extras(view))
        layer_states = self.cache.ragged[view.layer].state
        sequence_states = (
            layer_states
            if self.rows is None or not layer_states
            else [layer_states[sequence_index] for sequence_index in self.rows]
        )
        state_names = sequence_states[0] if sequence_states else ()
        state = {
            state_name: torch.cat([sequence_state[state_name] for sequence_state in sequence_states])
            for state_name in state_names
        }
        key, value = self.policy.merge.merge(view, entry_mask, state)
        self.states[view.layer] = state
        return Decision(entry_mask, self._extras(view), key, value)

    def state_of(self, layer_index: int) -> list[dict[str, Tensor]]:
        """Return the merger state of a layer, one item per sequence of this step."""
        state = self.states.get(layer_index, {})
        sequence_indices = range(len(self.budget))
        return [
            {state_name: tensor[sequence_index : sequence_index + 1] for state_name, tensor in state.items()}
            for sequence_index in sequence_indices
        ]


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
