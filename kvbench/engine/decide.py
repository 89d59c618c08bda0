"""The decision of one compression: score, allocate, select and merge, exact to the entry."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.clock import now
from kvbench.engine.shared import Known
from kvbench.engine.showing import Showing
from kvbench.engine.upkeep import goes_on
from kvbench.errors import BudgetError
from kvbench.parts import apportion
from kvbench.plugin import (
    AttentionMass,
    Need,
    Scored,
    Scores,
    View,
)
from kvbench.view.scores import checked_scores


class Decision(NamedTuple):
    """What one layer keeps: bool `[B, H, n]`, per-entry extras, and K and V if they changed."""

    keep: Tensor
    extras: dict[str | Need, Tensor]
    key: Tensor | None = None
    value: Tensor | None = None


@dataclass
class Cut(Showing):
    """One compression of one cache for one policy; several budgets have one row each.

    Attributes:
        states: State of the merger in every layer, for the sequences of this cut.
    """

    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.total = [b * self.info.layers * self.info.kv_heads for b in self.budget]
        self.by_layer = self.policy.allocate.scope != "model"
        self._flags: list[tuple[str, Tensor]] = []

    @property
    def at_once(self) -> bool:
        """Whether a layer can be decided as soon as its own forward has ended."""
        late = any(need.of_tokens or need.at_end for need in self.policy.needs)
        return self.by_layer and not late

    @cached_property
    def shares(self) -> Tensor:
        """Entries of every layer, int64 `[B, L]` (scopes `head` and `layer`).

        At a later cut a layer can hold less than its share; the others get the rest.

        Raises:
            BudgetError: The allocator's shares do not sum to the budget.
        """
        shares = self.policy.allocate.shares(self.info, self.length, self.mean).to(torch.int64)
        if shares.sum(1).tolist() != self.total:
            raise BudgetError(f"{self.policy}: the layers' shares do not sum to the budget")
        held = []
        for layer in self.cache.ragged:
            if layer.packed:
                rows = range(layer.batch) if self.rows is None else self.rows
                held.append(torch.tensor([layer.entries(row) for row in rows]))
            else:
                held.append(self.length.cpu() * self.info.kv_heads)
        most = torch.stack(held, 1).to(shares.device)
        if bool((shares <= most).all()):
            return shares
        return apportion(shares.double(), shares.sum(1), most)

    @property
    def keeps_all(self) -> bool:
        """Whether everything is kept."""
        return not self.policy.evicts or self.budget == self.length.tolist()

    def _extras(self, view: View) -> dict[str | Need, Tensor]:
        """Per-entry state to store with the entries, if another cut can come."""
        if not goes_on(self.policy, self.moment):
            return {}
        extras: dict[str | Need, Tensor] = {}
        extras.update(view.extras)
        for need, x in view.obs.items():
            if isinstance(need, AttentionMass):
                extras[need] = x.unflatten(1, (self.info.kv_heads, -1)).transpose(2, 3)
            elif need.goes_on:
                extras[need] = x
        return extras

    def layer(self, view: View) -> Decision:
        """Decide for one layer (scopes `head` and `layer`)."""
        view, scores = self._prepared(view)
        total = self.shares[:, view.layer].to(view.col.device)
        shares = self.policy.allocate.allocate([Scored(view, scores)], total)
        decision = self._select(view, scores, shares[:, 0])
        self.untouched()
        return decision

    def model(self, views: list[View]) -> list[Decision]:
        """Decide for all layers together (scope `model`)."""
        scored = [self._prepared(v) for v in views]
        total = torch.tensor(self.total, device=self.length.device)
        shares = self.policy.allocate.allocate(_gathered(scored, total.device), total)
        parts = zip(scored, shares.unbind(1), strict=True)
        decisions = [self._select(v, s, share.to(v.col.device)) for (v, s), share in parts]
        self.untouched()
        return decisions

    def whole(self, view: View) -> Decision:
        """Keep everything in one layer; the policy still initialises its extras."""
        if self.policy.score is not None and self.policy.score.extras:
            self._score(view)
        self.untouched()
        return Decision(view.valid.expand(len(self.budget), -1, -1), self._extras(view))

    def check(self, held: list[int]) -> None:
        """Compare the held entries with the budget, and read the flags that were collected.

        The flags are read once per cut, because reading one makes a GPU wait.

        Args:
            held: Entries of every sequence of this cut over all layers and heads.

        Raises:
            BudgetError: The number differs, a score was not finite, or a selector did not keep
                exactly its share.
        """
        if self._flags:
            where = self.length.device
            wrong = torch.stack([flag.to(where) for _, flag in self._flags]).tolist()
            for (text, _), bad in zip(self._flags, wrong, strict=True):
                if bad:
                    raise BudgetError(f"{self.policy}: {text}")
        for row, count in enumerate(held):
            if count != self.total[row]:
                raise BudgetError(
                    f"{self.policy} holds {count} entries where its budget of "
                    f"{self.budget[row]} per head allows exactly {self.total[row]}"
                )

    def _prepared(self, view: View) -> Scored:
        """Score one layer; with several budgets, view and scores get a row for each."""
        scores = self._score(view)
        if self.spread:
            budgets = self.mean.to(view.col.device)
            rows = [scores]
            if view.read_budget:
                rows += [self._score(view.for_budgets(budget[None])) for budget in budgets[1:]]
            value, protect = (
                torch.cat(parts) if len(rows) > 1 else parts[0].expand(len(budgets), -1, -1)
                for parts in zip(*((row.value, row.protect) for row in rows), strict=True)
            )
            scores, view = Scores(value, protect), view.for_budgets(budgets)
        return Scored(view, self.policy.select.prepare(view, scores))

    def _score(self, view: View) -> Scores:
        score = self.policy.score
        assert score is not None
        known = None if self.shared is None else self.shared.scores.get((view.layer, score))
        if known is not None:
            view.extras = {name: x.clone() for name, x in known.extras.items()}
            self.saved += known.seconds
            self._flags.append(known.flag)
            return self._shown_scores(_copied(known.scores))
        begin = now(view.col.device)
        try:
            rated = checked_scores(score.score(view), view)
        except BudgetError as error:
            raise BudgetError(f"{self.policy}: {error}") from error
        found = Scores(rated.value.float(), rated.protect)
        finite = (found.value.isfinite() | ~view.valid).all()
        flag = (f"a score of layer {view.layer} is not finite", ~finite)
        self._flags.append(flag)
        if self.shared is not None and not view.read_budget:
            seconds = now(view.col.device) - begin
            self.shared_seconds += seconds
            # Copies: a selector may write to its scores, whichever way.
            extras = {name: x.clone() for name, x in view.extras.items()}
            entry = Known(_copied(found), extras, seconds, flag)
            self.shared.scores[view.layer, score] = entry
        return self._shown_scores(found)

    def _shown_scores(self, scores: Scores) -> Scores:
        """Note scores that the other parts of the policy are given."""
        self._changes.show("scores", scores.value)
        self._changes.show("protect", scores.protect)
        return scores

    def _select(self, view: View, scores: Scores, share: Tensor) -> Decision:
        keep = self.policy.select.select(view, scores, share)
        wrong = (keep & ~view.valid).any() | (keep.sum(-1) != share).any()
        text = f"in layer {view.layer} the selector did not keep exactly each head's share"
        self._flags.append((text, wrong))
        if self.policy.merge is None:
            return Decision(keep, self._extras(view))
        held = self.cache.ragged[view.layer].state
        own = held if self.rows is None or not held else [held[row] for row in self.rows]
        names = own[0] if own else ()
        state = {name: torch.cat([of_row[name] for of_row in own]) for name in names}
        key, value = self.policy.merge.merge(view, keep, state)
        self.states[view.layer] = state
        return Decision(keep, self._extras(view), key, value)

    def state_of(self, layer: int) -> list[dict[str, Tensor]]:
        """The merger's state in a layer, separately for every sequence of this cut."""
        state = self.states.get(layer, {})
        rows = range(len(self.budget))
        return [{name: x[row : row + 1] for name, x in state.items()} for row in rows]


def _copied(scores: Scores) -> Scores:
    return Scores(scores.value.clone(), scores.protect.clone())


def _gathered(scored: list[Scored], device: torch.device) -> list[Scored]:
    """Move scores and views of all layers, without keys and values, to one device."""
    if all(s.view.col.device == device for s in scored):
        return scored
    out = []
    for view, scores in scored:
        near = copy.copy(view)
        near.length, near.col, near.position = (
            x.to(device) for x in (view.length, view.col, view.position)
        )
        near.valid, near.seed = view.valid.to(device), view.seed.to(device)
        near.obs = {need: x.to(device) for need, x in view.obs.items()}
        near.extras = {name: x.to(device) for name, x in view.extras.items()}
        moved = Scores(scores.value.to(device), scores.protect.to(device))
        out.append(Scored(near, moved))
    return out
