"""What a policy is shown of a cache: one view per layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.clock import now
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.shared import Changes, Shared
from kvbench.errors import BudgetError
from kvbench.plugin import CHANNEL_QUERIES, ModelInfo, Moment, Need, Policy, Surprisal, View

_OWN: tuple[object, ...] = ("budget", Surprisal())
"""Tensors of a view that are made for every policy anew."""


@dataclass
class Showing:
    """Shows the layers of one cache to one policy.

    Attributes:
        policy: The policy.
        cache: The cache; it is only read.
        info: The model.
        moment: When it is cut.
        budget: Mean entries per (layer, head) of every sequence that is shown, `b` (on the CPU).
            With more budgets than sequences, the only sequence is cut to several budgets at once.
        seeds: Noise seeds of all sequences of the cache, int64 `[B]`.
        shared: What other cells on the same prefill have made.
        rows: Sequences to show; None: all.
        final, coming: As in `View`.
        saved: Seconds that were saved by reusing what other cells have made.
        shared_seconds: Seconds that were spent on what all budgets, and later cells, share.
        length: Tokens of every sequence, int64 `[B]`; one for each budget.
        mean: `budget` as a tensor, int64 `[B]`.
        spread: Whether there are several budgets for the only sequence.
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
    shared_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._index = None
        if self.rows is not None:
            self._index = torch.tensor(self.rows, device=self.seeds.device)
        self.length = self._fixed("length", lambda: self._own(self.cache.lengths()))
        self.spread = len(self.budget) > len(self.length)
        if self.spread:
            self.length = self.length.expand(len(self.budget))
        self.mean = torch.tensor(self.budget, device=self.length.device)
        self._changes = Changes()
        weight = partial(_noted, self.info.output_weight, self._changes)
        self._shown_model = replace(self.info, output_weight=weight)

    def _fixed(self, name: str, make: Callable[[], Tensor], *key: Hashable) -> Tensor:
        """Make a field of the views, once for all cells if they share what they are shown."""
        return make() if self.shared is None else self.shared.ledger.once((name, *key), name, make)

    def _own(self, x: Tensor) -> Tensor:
        """Select the sequences of this cut."""
        return x if self._index is None else x[self._index.to(x.device)]

    def _marked(self, columns: Tensor | None, col: Tensor) -> Tensor:
        """Which entries are in marked columns (bool `[B, S]`; None: none is), `[B, H, n]`."""
        if columns is None:
            return torch.zeros_like(col, dtype=torch.bool)
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
            key, value = layer.read(rows, self.rows)
            col = layer.col[rows].long()
            extras = {n: held[rows] for n, held in layer.extras.items() if isinstance(n, str)}
        else:
            rows = None
            dense_key, dense_value, tokens = layer.key, layer.value, self.cache.valid
            key = self._fixed("key", lambda: self._own(dense_key), index)
            value = self._fixed("value", lambda: self._own(dense_value), index)
            where, shape = key.device, key.shape[:3]
            col = self._fixed(
                "col", lambda: torch.arange(shape[2], device=where).expand(shape), where, shape
            )
            valid = self._fixed(
                "valid", lambda: self._own(tokens).to(where)[:, None].expand(shape), where, shape
            )
            for name, dtype in ({} if score is None else score.extras).items():
                extras[name] = torch.zeros(key.shape[:3], dtype=dtype, device=key.device)
        obs: dict[Need, Tensor] = {}
        for need in self.policy.needs:
            found = self._observed(need, layer, index, col, rows)
            if found is not None:
                obs[need] = found
        entry = (col.device, col.shape)
        fixed = (lambda name, make: make()) if layer.packed else partial(self._each, entry)
        view = View(
            layer=index,
            moment=self.moment,
            length=self.length[: len(key)].to(key.device),
            col=col,
            position=fixed("position", lambda: self.cache.positions(col, self._index)),
            valid=valid,
            key=key,
            value=value,
            obs=obs,
            extras=extras,
            model=self._shown_model,
            scale=layer.scale,
            seed=self._own(self.seeds).to(key.device),
            budget=self.mean[: len(key)].to(key.device),
            turns_ago=fixed("turns_ago", lambda: self._turns_ago(col)),
            visual=fixed("visual", lambda: self._marked(self.cache.visual, col)),
            pruned=fixed("pruned", lambda: self._marked(self.cache.pruned, col)),
            final=self.final,
            coming=self.coming,
            asked=0 if layer.packed else self.cache.asked,
            share=None if layer.packed or self.shared is None else partial(self._once, index),
        )
        for field, x in view.tensors():
            if self.shared is None or field in _OWN:  # the ledger watches the others
                self._changes.show(field, x)
        return view

    def _each(self, entries: Hashable, name: str, make: Callable[[], Tensor]) -> Tensor:
        """`_fixed` for a field that is the same in all layers with the same entries."""
        return self._fixed(name, make, entries)

    def untouched(self) -> None:
        """Check that the policy left its inputs alone: other cells see the same tensors.

        Raises:
            BudgetError: The policy changed a tensor of the view in place.
        """
        if name := self._changes.first():
            raise BudgetError(f"{self.policy} changed {name} in place; change a copy instead")
        self._changes.forget()

    def channel_queries(self, index: int) -> Tensor:
        """The queries that choose key channels in a layer, `[B, H_q, w, d]`."""
        return self._own(self.cache.observers[CHANNEL_QUERIES].read(index))

    def _once(self, layer: int, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """See `View.once`."""
        assert self.shared is not None
        known = self.shared.made.get((layer, name))
        if known is None:
            begin = now(self.length.device)
            known = make(), now(self.length.device) - begin
            self.shared.made[layer, name] = known
            self.shared.ledger.add(str(name), known[0])
            self.shared_seconds += known[1]
        else:
            self.saved += known[1]
        self._changes.show(str(name), known[0])
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
        observed = self.cache.observers[need]
        name = "obs" if self.shared is None else f"obs[{need}]"
        return self._fixed(name, lambda: self._own(observed.read(index)), index)

    def _turns_ago(self, col: Tensor) -> Tensor:
        """How many turns before the newest one each entry was added; 0 outside dialogues."""
        starts = self.cache.turns
        if not any(starts):
            return torch.zeros_like(col)
        own = starts if self.rows is None else [starts[row] for row in self.rows]
        ago = torch.zeros_like(col)
        for n in range(max(len(row) for row in own)):
            first = torch.tensor([row[n] if n < len(row) else 0 for row in own], device=col.device)
            ago += col < first[:, None, None]
        return ago


def _noted(weight: Callable[[int], Tensor], changes: Changes, layer: int) -> Tensor:
    """The output projection of a layer, a copy; whether the policy writes to it is noticed."""
    copied = weight(layer)
    changes.show("model.output_weight", copied)
    return copied
