"""The decision of one compression: score, allocate, select and merge, exact to the entry."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.shared import Changes, Known, Shared, versions
from kvbench.engine.upkeep import goes_on
from kvbench.errors import BudgetError
from kvbench.parts import apportion
from kvbench.plugin import (
    AttentionMass,
    ModelInfo,
    Moment,
    Need,
    Policy,
    Scored,
    Scores,
    View,
    protect_nothing,
)


class Decision(NamedTuple):
    """What one layer keeps: bool `[B, H, n]`, per-entry extras, and K and V if they changed."""

    keep: Tensor
    extras: dict[str | Need, Tensor]
    key: Tensor | None = None
    value: Tensor | None = None


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Cut:
    """One compression of one cache for one policy.

    Attributes:
        policy: The policy.
        cache: The cache to cut; it is only read.
        info: The model.
        moment: When it is cut.
        budget: Mean entries per (layer, head) of every sequence that is cut, `b` (on the CPU).
        seeds: Noise seeds of all sequences of the cache, int64 `[B]`.
        shared: Scores of other cells on the same prefill.
        rows: Sequences to cut; None: all.
        final, coming: As in `View`.
        saved: Seconds that this cut saved by reusing scores.
        states: State of the merger in every layer, for the sequences of this cut.
    """

    policy: Policy
    cache: RaggedCache
    info: ModelInfo
    moment: Moment
    budget: list[int]
    seeds: Tensor
    shared: Shared | None = None
    rows: list[int] | None = None
    final: bool = True
    coming: int = 0
    saved: float = 0.0
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._index = None
        if self.rows is not None:
            self._index = torch.tensor(self.rows, device=self.seeds.device)
        self.length = self._own(self.cache.lengths())
        self.mean = torch.tensor(self.budget, device=self.length.device)
        self.total = [b * self.info.layers * self.info.kv_heads for b in self.budget]
        self.by_layer = self.policy.allocate.scope != "model"
        self._changes = Changes()
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

    def _own(self, x: Tensor) -> Tensor:
        """Select the sequences of this cut."""
        return x if self._index is None else x[self._index.to(x.device)]

    def _marked(self, columns: Tensor | None, col: Tensor) -> Tensor | None:
        """Which entries are in marked columns (bool `[B, S]`, or None), `[B, H, n]`."""
        if columns is None:
            return None
        own = self._own(columns).to(col.device)
        return own[:, None].expand(-1, col.shape[1], -1).gather(-1, col)

    def view(self, layer: RaggedLayer, index: int) -> View:
        """Make the view of one layer as it is now.

        Args:
            layer: A dense or packed layer.
            index: Its index among the full-attention layers.

        Raises:
            Exception: An observer that the policy needs has failed.
        """
        assert layer.key is not None and layer.value is not None and self.cache.valid is not None
        score = self.policy.score
        extras: dict[str, Tensor] = {}
        if layer.packed:
            rows, valid = layer.padded_rows(self.rows)
            key, value, col = layer.key[rows], layer.value[rows], layer.col[rows].long()
            extras = {n: held[rows] for n, held in layer.extras.items() if isinstance(n, str)}
        else:
            rows = None
            key, value = self._own(layer.key), self._own(layer.value)
            columns = torch.arange(key.shape[2], device=key.device)
            col = columns.expand(key.shape[:3])
            valid = self._own(self.cache.valid).to(key.device)[:, None].expand(key.shape[:3])
            for name, dtype in ({} if score is None else score.extras).items():
                extras[name] = torch.zeros(key.shape[:3], dtype=dtype, device=key.device)
        obs: dict[Need, Tensor] = {}
        for need in self.policy.needs:
            found = self._observed(need, layer, index, col, rows)
            if found is not None:
                obs[need] = found
        if not layer.packed:  # views of packed layers hold copies
            shown = {"key": key, "value": value, **{f"obs[{need}]": x for need, x in obs.items()}}
            for name, x in shown.items():
                self._changes.show(name, x, *versions(x))
        return View(
            layer=index,
            moment=self.moment,
            length=self.length.to(key.device),
            col=col,
            position=self.cache.positions(col, self._index),
            valid=valid,
            key=key,
            value=value,
            obs=obs,
            extras=extras,
            model=self.info,
            scale=layer.scale,
            seed=self._own(self.seeds).to(key.device),
            budget=self.mean.to(key.device),
            turns_ago=self._turns_ago(col),
            visual=self._marked(self.cache.visual, col),
            pruned=self._marked(self.cache.pruned, col),
            final=self.final,
            coming=self.coming,
            asked=0 if layer.packed else self.cache.asked,
            once=partial(self._once, None if layer.packed else index),
        )

    def _once(self, layer: int | None, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """See `View.once`; without a dense layer there is nothing to share."""
        if layer is None or self.shared is None:
            return make()
        known = self.shared.made.get((layer, name))
        if known is None:
            begin = now(self.length.device)
            known = make(), now(self.length.device) - begin
            self.shared.made[layer, name] = known
        else:
            self.saved += known[1]
        self._changes.show(str(name), known[0], *versions(known[0]))
        return known[0]

    def _observed(
        self, need: Need, layer: RaggedLayer, index: int, col: Tensor, rows: Tensor | None
    ) -> Tensor | None:
        """The observation of a need; None if it was only observed during the prefill."""
        if need in self.cache.broken:
            raise self.cache.broken[need]
        if need.of_tokens:
            assert self.cache.valid is not None
            found = self._own(self.cache.token_observers[need].read(self.cache.valid))
            found = found.to(col.device)
            return found[:, None].expand(-1, col.shape[1], -1).gather(-1, col)
        if rows is not None and need.per_entry:
            if need not in layer.extras:
                return None
            held = layer.extras[need][rows]
            return held if held.dim() == 3 else held.transpose(2, 3).flatten(1, 2)
        return self._own(self.cache.observers[need].read(index))

    def _turns_ago(self, col: Tensor) -> Tensor | None:
        """How many turns before the newest one each entry was added; None outside dialogues."""
        starts = self.cache.turns
        if not any(starts):
            return None
        own = starts if self.rows is None else [starts[row] for row in self.rows]
        ago = torch.zeros_like(col)
        for n in range(max(len(row) for row in own)):
            first = torch.tensor([row[n] if n < len(row) else 0 for row in own], device=col.device)
            ago += col < first[:, None, None]
        return ago

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
        scores = self.policy.select.prepare(view, self._score(view))
        total = self.shares[:, view.layer].to(view.col.device)
        shares = self.policy.allocate.allocate([Scored(view, scores)], total)
        decision = self._select(view, scores, shares[:, 0])
        self._untouched()
        return decision

    def model(self, views: list[View]) -> list[Decision]:
        """Decide for all layers together (scope `model`)."""
        scored = [Scored(v, self.policy.select.prepare(v, self._score(v))) for v in views]
        total = torch.tensor(self.total, device=self.length.device)
        shares = self.policy.allocate.allocate(_gathered(scored, total.device), total)
        parts = zip(scored, shares.unbind(1), strict=True)
        decisions = [self._select(v, s, share.to(v.col.device)) for (v, s), share in parts]
        self._untouched()
        return decisions

    def whole(self, view: View) -> Decision:
        """Keep everything in one layer; the policy still initialises its extras."""
        if self.policy.score is not None and self.policy.score.extras:
            self._score(view)
        self._untouched()
        return Decision(view.valid, self._extras(view))

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

    def _score(self, view: View) -> Scores:
        score = self.policy.score
        assert score is not None
        known = None if self.shared is None else self.shared.scores.get((view.layer, score))
        if known is not None:
            view.extras = dict(known.extras)
            self.saved += known.seconds
            self._show_scores(known.scores, known.versions)
            return known.scores
        begin = now(view.col.device)
        found: object = score.score(view)
        if isinstance(found, Tensor):
            found = Scores(found, protect_nothing(view))
        if not isinstance(found, Scores):
            raise BudgetError(
                f"{self.policy}: the score returned {type(found).__name__}; "
                "return a float tensor [B, H, n] or Scores"
            )
        if found.value.shape != view.shape or found.protect.shape != view.shape:
            raise BudgetError(
                f"{self.policy}: the score returned shape {list(found.value.shape)}; "
                f"return {list(view.shape)}"
            )
        found = Scores(found.value.float(), found.protect)
        finite = (found.value.isfinite() | ~view.valid).all()
        self._flags.append((f"a score of layer {view.layer} is not finite", ~finite))
        marks = versions(found.value, found.protect)
        self._show_scores(found, marks)
        if self.shared is not None and not view.read_budget:
            seconds = now(view.col.device) - begin
            entry = Known(found, dict(view.extras), marks, seconds)
            self.shared.scores[view.layer, score] = entry
        return found

    def _show_scores(self, scores: Scores, marks: tuple[int, ...]) -> None:
        self._changes.show("scores", scores.value, marks[0])
        self._changes.show("protect", scores.protect, marks[1])

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

    def note_changes(self) -> str:
        """Find out whether the policy has changed a tensor that other cells see.

        Sets `cache.spoiled` if so, and also if that cannot be known.

        Returns:
            The name of a changed tensor, or an empty string.
        """
        changed = self._changes.first()
        self.cache.spoiled |= bool(changed) or self._changes.unknown
        return changed

    def _untouched(self) -> None:
        """Check that the policy left its inputs alone: other cells see the same tensors.

        Raises:
            BudgetError: The policy changed a tensor of the view in place.
        """
        if self._changes.first():
            name = self.note_changes()
            raise BudgetError(f"{self.policy} changed {name} in place; change a copy instead")
        self._changes.forget()


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
