"""One compression: score, allocate, select, merge; exact to the entry."""

from __future__ import annotations

import hashlib
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
    """What one layer keeps: bool `[B, H, n]`, K and V `[B, H, n, d]`, and the policy's extras."""

    keep: Tensor
    key: Tensor
    value: Tensor
    extras: dict[str, Tensor]


@dataclass
class Shared:
    """Scores that several cells of one prefill share, by (layer, score)."""

    scores: dict[tuple[int, Score], tuple[Scores, dict[str, Tensor]]] = field(default_factory=dict)


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
        budget: Mean entries per (layer, head) of every sequence, `b` (CPU).
        seeds: Noise seeds, int64 `[B]`.
        shared: Scores of other cells on the same prefill.
    """

    policy: Policy
    cache: RaggedCache
    info: ModelInfo
    moment: Moment
    budget: list[int]
    seeds: Tensor
    shared: Shared | None = None

    def __post_init__(self) -> None:
        self.length = self.cache.lengths()
        self.mean = torch.tensor(self.budget, device=self.length.device)
        self.total = [b * self.info.layers * self.info.kv_heads for b in self.budget]
        self.by_layer = self.policy.allocate.scope != "model"
        if self.by_layer:
            shares = self.policy.allocate.shares(self.info, self.length, self.mean)
            self.shares = shares.to(torch.int64)
            if self.shares.sum(1).tolist() != self.total:
                raise BudgetError(f"{self.policy}: the layers' shares do not sum to the budget")

    def view(self, layer: RaggedLayer, index: int, mass: Tensor | None = None) -> View:
        """Show one layer as it is held now.

        Args:
            layer: A dense or packed layer.
            index: Its index among the full-attention layers.
            mass: Attention that the held entries received in this step (packed layers).
        """
        assert layer.key is not None and layer.value is not None and self.cache.valid is not None
        if layer.packed:
            rows, valid = layer.padded_rows()
            key, value, col = layer.key[rows], layer.value[rows], layer.col[rows].long()
            extras = {name: held[rows] for name, held in layer.extras.items()}
        else:
            key, value = layer.key, layer.value
            columns = torch.arange(key.shape[2], device=key.device)
            col = columns.expand(key.shape[:3])
            valid = self.cache.valid[:, None].expand(key.shape[:3])
            extras = {}
            if self.policy.score is not None:
                for name, dtype in self.policy.score.extras.items():
                    extras[name] = torch.zeros(key.shape[:3], dtype=dtype, device=key.device)
        obs: dict[Need, Tensor] = {}
        for need in self.policy.needs:
            if layer.packed and need.per_entry:
                if mass is not None:
                    obs[need] = mass
            else:
                obs[need] = self.cache.observers[need].read(index)
        return View(
            layer=index,
            moment=self.moment,
            length=self.length,
            col=col,
            position=self.cache.positions(col),
            valid=valid,
            key=key,
            value=value,
            obs=obs,
            extras=extras,
            model=self.info,
            scale=layer.scale,
            seed=self.seeds,
            budget=self.mean,
        )

    def layer(self, view: View) -> Decision:
        """Decide for one layer on its own (scopes `head` and `layer`)."""
        scores = self._score(view)
        total = self.shares[:, view.layer]
        shares = self.policy.allocate.allocate([Scored(view, scores)], total)
        return self._select(view, scores, shares[:, 0])

    def model(self, views: list[View]) -> list[Decision]:
        """Decide for all layers together (scope `model`)."""
        scored = [Scored(v, self._score(v)) for v in views]
        total = torch.tensor(self.total, device=self.length.device)
        shares = self.policy.allocate.allocate(scored, total)
        return [self._select(v, s, shares[:, i]) for i, (v, s) in enumerate(scored)]

    def whole(self, view: View) -> Decision:
        """Keep everything that one layer holds; a policy with extras still starts them."""
        if self.policy.score is not None and self.policy.score.extras:
            self._score(view)
        return Decision(view.valid, view.key, view.value, view.extras)

    def check(self, held: list[int], rows: list[int] | None = None) -> None:
        """Compare what is held with what the budget allows.

        Args:
            held: Entries of every sequence over all layers and heads.
            rows: Which sequences were cut; None: all.

        Raises:
            BudgetError: They differ.
        """
        for row in range(len(held)) if rows is None else rows:
            if held[row] != self.total[row]:
                raise BudgetError(
                    f"{self.policy} holds {held[row]} entries where its budget of "
                    f"{self.budget[row]} per head allows exactly {self.total[row]}"
                )

    def _score(self, view: View) -> Scores:
        score = self.policy.score
        assert score is not None
        known = None if self.shared is None else self.shared.scores.get((view.layer, score))
        if known is not None:
            view.extras = dict(known[1])
            return known[0]
        found = score.score(view)
        if isinstance(found, Tensor):
            found = Scores(found, protect_nothing(view))
        if found.value.shape != view.shape or found.protect.shape != view.shape:
            raise BudgetError(
                f"{self.policy}: scores of shape {list(found.value.shape)}, "
                f"{list(view.shape)} would be right"
            )
        found = Scores(found.value.float(), found.protect)
        if not bool((found.value.isfinite() | ~view.valid).all()):
            raise BudgetError(f"{self.policy}: a score of layer {view.layer} is not finite")
        if self.shared is not None and not view.read_budget:
            self.shared.scores[view.layer, score] = (found, dict(view.extras))
        return found

    def _select(self, view: View, scores: Scores, share: Tensor) -> Decision:
        keep = self.policy.select.select(view, scores, share)
        if bool((keep & ~view.valid).any()) or not bool((keep.sum(-1) == share).all()):
            raise BudgetError(
                f"{self.policy}: in layer {view.layer} the selector did not keep "
                "exactly the entries of each head's share"
            )
        key, value = view.key, view.value
        if self.policy.merge is not None:
            state = self.cache.ragged[view.layer].state
            key, value = self.policy.merge.merge(view, keep, state)
        return Decision(keep, key, value, view.extras)


def cut_cache(cut: Cut, target: RaggedCache, reserve: int | None = None) -> None:
    """Compress all layers of `cut.cache` into `target` (which may be the same cache).

    Args:
        cut: What to do.
        target: Gets the packed layers, the counts and the observers.
        reserve: Rows of room per segment.

    Raises:
        BudgetError: The policy did not meet its budget to the entry.
    """
    source = cut.cache
    full = cut.policy.is_full or cut.budget == cut.length.tolist()
    layers = list(zip(source.ragged, target.ragged, strict=True))
    decisions: list[Decision] | None = None
    if not full and not cut.by_layer:
        decisions = cut.model([cut.view(layer, i) for i, (layer, _) in enumerate(layers)])
    for i, (layer, into) in enumerate(layers):
        view = cut.view(layer, i)
        if full:
            decision = cut.whole(view)
        elif decisions is not None:
            decision = decisions[i]
        else:
            decision = cut.layer(view)
        store(layer, into, decision, view.col, reserve)
    finish(cut, target)


def store(
    source: RaggedLayer,
    target: RaggedLayer,
    decision: Decision,
    col: Tensor,
    reserve: int | None = None,
) -> None:
    """Pack what was decided for one layer."""
    target.seen, target.dim, target.scale = source.seen, source.dim, source.scale
    target.dtype, target.device = source.dtype, source.device
    target.is_initialized = True
    target.state = source.state
    target.pack(decision.key, decision.value, decision.keep, col, decision.extras, reserve)


def finish(cut: Cut, target: RaggedCache) -> None:
    """Record and check what is held after a compression."""
    held = [target.live_entries(row) for row in range(cut.cache.batch)]
    cut.check(held)
    target.budget_entries, target.held_entries = cut.total, held
