"""One compression: score, allocate, select, merge; exact to the entry."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.layer import RaggedLayer
from kvbench.errors import BudgetError
from kvbench.plugin import (
    ModelInfo,
    Moment,
    Need,
    Policy,
    Score,
    Scored,
    Scores,
    View,
    protect_nothing,
)


class Decision(NamedTuple):
    """What one layer keeps: bool `[B, H, n]`, the policy's extras, K and V where they changed."""

    keep: Tensor
    extras: dict[str, Tensor]
    key: Tensor | None = None
    value: Tensor | None = None


class Known(NamedTuple):
    """Scores of one layer that later cells may use, with the seconds that they took."""

    scores: Scores
    extras: dict[str, Tensor]
    versions: tuple[int, ...]
    seconds: float


@dataclass
class Shared:
    """Scores that several cells of one prefill share, by (layer, score)."""

    scores: dict[tuple[int, Score], Known] = field(default_factory=dict)


def now(device: torch.device) -> float:
    """Seconds of a clock that waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def row_seeds(cache: RaggedCache, seed: int) -> Tensor:
    """Noise seeds of the sequences, int64 `[B]`: from the run's seed and each one's own tokens.

    Padding does not count, so that a row has the same noise in every batch.
    """
    assert cache.valid is not None
    if cache.ids is None:
        return torch.full((cache.batch,), seed, device=cache.valid.device)
    ids = torch.cat([i.to(cache.valid.device) for i in cache.ids], 1)
    out = []
    for row, valid in zip(ids.cpu(), cache.valid.cpu(), strict=True):
        text = ",".join(map(str, row[valid].tolist()))
        digest = hashlib.blake2b(f"{seed}|{text}".encode(), digest_size=4).digest()
        out.append(int.from_bytes(digest, "big"))
    return torch.tensor(out, device=cache.valid.device)


@dataclass
class Cut:
    """One compression of one cache for one policy.

    Attributes:
        policy: The policy.
        cache: What is cut (it is read only).
        info: The model.
        moment: When.
        budget: Mean entries per (layer, head) of every sequence that is cut, `b` (CPU).
        seeds: Noise seeds of all sequences of the cache, int64 `[B]`.
        shared: Scores of other cells on the same prefill.
        rows: Which sequences are cut; None: all.
        saved: Seconds that shared scores have spared this cut.
        states: What mergers keep of every layer, for this cell alone.
    """

    policy: Policy
    cache: RaggedCache
    info: ModelInfo
    moment: Moment
    budget: list[int]
    seeds: Tensor
    shared: Shared | None = None
    rows: list[int] | None = None
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
        self._shown: list[tuple[str, Tensor, int]] = []
        self._flags: list[tuple[str, Tensor]] = []
        if self.by_layer:
            shares = self.policy.allocate.shares(self.info, self.length, self.mean)
            self.shares = shares.to(torch.int64)
            if self.shares.sum(1).tolist() != self.total:
                raise BudgetError(f"{self.policy}: the layers' shares do not sum to the budget")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing has to go."""
        return self.policy.is_full or self.budget == self.length.tolist()

    def _own(self, x: Tensor) -> Tensor:
        """The rows of this cut."""
        return x if self._index is None else x[self._index]

    def view(self, layer: RaggedLayer, index: int, mass: Tensor | None = None) -> View:
        """Show one layer as it is held now.

        Args:
            layer: A dense or packed layer.
            index: Its index among the full-attention layers.
            mass: Attention that the held entries received in this step (packed layers).

        Raises:
            Exception: Whatever an observer that the policy needs has raised.
        """
        assert layer.key is not None and layer.value is not None and self.cache.valid is not None
        if layer.packed:
            rows, valid = layer.padded_rows()
            rows, valid = self._own(rows), self._own(valid)
            key, value, col = layer.key[rows], layer.value[rows], layer.col[rows].long()
            extras = {name: held[rows] for name, held in layer.extras.items()}
        else:
            key, value = self._own(layer.key), self._own(layer.value)
            columns = torch.arange(key.shape[2], device=key.device)
            col = columns.expand(key.shape[:3])
            valid = self._own(self.cache.valid)[:, None].expand(key.shape[:3])
            extras = {}
            if self.policy.score is not None:
                for name, dtype in self.policy.score.extras.items():
                    extras[name] = torch.zeros(key.shape[:3], dtype=dtype, device=key.device)
        obs: dict[Need, Tensor] = {}
        for need in self.policy.needs:
            if need in self.cache.broken:
                raise self.cache.broken[need]
            if layer.packed and need.per_entry:
                if mass is not None:
                    obs[need] = self._own(mass)
            else:
                obs[need] = self._own(self.cache.observers[need].read(index))
        if not layer.packed:  # of a packed layer the view holds copies
            shown = {"key": key, "value": value, **{f"obs[{need}]": x for need, x in obs.items()}}
            self._shown += [(name, x, versions(x)[0]) for name, x in shown.items()]
        return View(
            layer=index,
            moment=self.moment,
            length=self.length,
            col=col,
            position=self.cache.positions(col, self._index),
            valid=valid,
            key=key,
            value=value,
            obs=obs,
            extras=extras,
            model=self.info,
            scale=layer.scale,
            seed=self._own(self.seeds),
            budget=self.mean,
        )

    def layer(self, view: View) -> Decision:
        """Decide for one layer on its own (scopes `head` and `layer`)."""
        scores = self._score(view)
        total = self.shares[:, view.layer]
        shares = self.policy.allocate.allocate([Scored(view, scores)], total)
        decision = self._select(view, scores, shares[:, 0])
        self._untouched()
        return decision

    def model(self, views: list[View]) -> list[Decision]:
        """Decide for all layers together (scope `model`)."""
        scored = [Scored(v, self._score(v)) for v in views]
        total = torch.tensor(self.total, device=self.length.device)
        shares = self.policy.allocate.allocate(scored, total)
        decisions = [self._select(v, s, shares[:, i]) for i, (v, s) in enumerate(scored)]
        self._untouched()
        return decisions

    def whole(self, view: View) -> Decision:
        """Keep everything that one layer holds; a policy with extras still starts them."""
        if self.policy.score is not None and self.policy.score.extras:
            self._score(view)
        self._untouched()
        return Decision(view.valid, view.extras)

    def check(self, held: list[int]) -> None:
        """Compare what is held with what the budget allows, and read all that was flagged.

        Args:
            held: Entries of every sequence of this cut over all layers and heads.

        Raises:
            BudgetError: They differ, a score was not finite, or a selector left its share.
        """
        if self._flags:
            wrong = torch.stack([flag for _, flag in self._flags]).tolist()
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
                f"{self.policy}: its score returned {type(found).__name__}; "
                "a float tensor [B, H, n] or Scores would be right"
            )
        if found.value.shape != view.shape or found.protect.shape != view.shape:
            raise BudgetError(
                f"{self.policy}: scores of shape {list(found.value.shape)}, "
                f"{list(view.shape)} would be right"
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
        self._shown += [("scores", scores.value, marks[0]), ("protect", scores.protect, marks[1])]

    def _select(self, view: View, scores: Scores, share: Tensor) -> Decision:
        keep = self.policy.select.select(view, scores, share)
        wrong = (keep & ~view.valid).any() | (keep.sum(-1) != share).any()
        text = f"in layer {view.layer} the selector did not keep exactly each head's share"
        self._flags.append((text, wrong))
        if self.policy.merge is None:
            return Decision(keep, view.extras)
        held = self.cache.ragged[view.layer].state
        state = self.states.setdefault(view.layer, dict(held))
        key, value = self.policy.merge.merge(view, keep, state)
        return Decision(keep, view.extras, key, value)

    def _untouched(self) -> None:
        """Other cells see the same tensors: whoever changes them in place fails.

        Raises:
            BudgetError: A tensor of the view was changed; the prefill is spoiled.
        """
        for name, x, version in self._shown:
            if versions(x) != (version,):
                self.cache.spoiled = True
                raise BudgetError(f"{self.policy} changed {name} in place; a copy would be right")
        self._shown.clear()


def versions(*tensors: Tensor) -> tuple[int, ...]:
    """How often tensors were written to; unknown (0) for those of inference mode."""
    return tuple(0 if x.is_inference() else x._version for x in tensors)


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
    target.state = cut.states.get(index, dict(source.state))
    columns = torch.arange(key.shape[2], device=key.device).expand(key.shape[:3])
    target.pack(key, value, decision.keep, columns, decision.extras, reserve)


def cut_back(cut: Cut, cache: RaggedCache) -> None:
    """Cut some rows of a packed cache back; the others keep all that they hold.

    Args:
        cut: With `rows` set.
        cache: The cache, `cut.cache`.

    Raises:
        BudgetError: The policy did not meet its budget to the entry.
    """
    assert cut.rows is not None
    index = torch.tensor(cut.rows, device=cut.length.device)
    views = [cut.view(layer, i) for i, layer in enumerate(cache.ragged)]
    decisions = [cut.layer(v) for v in views] if cut.by_layer else cut.model(views)
    for i, (layer, made) in enumerate(zip(cache.ragged, decisions, strict=True)):
        rows, keep = layer.padded_rows()
        chosen = rows[index][made.keep]
        for name, extra in made.extras.items():
            layer.extras[name][chosen] = extra[made.keep]
        if made.key is not None and made.value is not None:
            layer.overwrite(chosen, made.key[made.keep], made.value[made.keep])
        keep[index] = made.keep
        layer.state = cut.states.get(i, layer.state)
        layer.evict(keep, cut.rows)
    held = [cache.live_entries(row) for row in cut.rows]
    cut.check(held)
    cache.budget_entries, cache.held_entries = cut.total, held


def finish(cut: Cut, target: RaggedCache) -> None:
    """Record and check what is held after a compression."""
    held = [target.live_entries(row) for row in range(cut.cache.batch)]
    cut.check(held)
    target.budget_entries, target.held_entries = cut.total, held
