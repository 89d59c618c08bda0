"""Builder of the views that a policy gets of a cache, one per layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.integrity import Ledger
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.observers import QueryObserver
from kvbench.engine.threads import now
from kvbench.errors import BudgetError
from kvbench.plugin import (
    CHANNEL_QUERIES,
    ModelInfo,
    Moment,
    Need,
    Observer,
    Policy,
    Queries,
    Score,
    Scores,
    Separable,
    View,
)
from kvbench.view.shown import LayerNeeded, repeated

_PER_POLICY: tuple[object, ...] = ("budget",)
"""Tensors of a view that are created anew for every policy."""


@dataclass
class ViewBuilder:
    """Builds the views of one cache's layers for one policy.

    Attributes:
        cache: The cache; read only.
        moment: When entries are evicted.
        budget: Mean entries per (layer, head) of every viewed sequence, `b` (on the CPU). With more budgets than
            sequences, the only sequence gets several budgets at once.
        seeds: Noise seeds of all sequences of the cache, int64 `[B]`.
        shared: State of the prefill shared with other cells.
        rows: Sequences to view; None: all.
        final, coming: As in `View`.
        saved: Seconds saved by reusing results of other cells.
        shared_seconds: Seconds spent on results shared by all budgets and later cells.
        length: Tokens of every sequence, int64 `[B]`; one per budget.
        mean: `budget` as a tensor, int64 `[B]`.
        spread: Whether there are several budgets for the only sequence.
        row_indices: Rows of the viewed entries of packed layers, int64 `[B, H, n]`, by layer; `n` is that of the view.
    """

    policy: Policy
    cache: RaggedCache
    info: ModelInfo
    moment: Moment
    budget: list[int]
    seeds: Tensor
    shared: PrefixCache | None = None
    rows: list[int] | None = None
    final: bool = True
    coming: int = 0
    saved: float = 0.0
    shared_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.row_indices: dict[int, Tensor] = {}
        self._separated: dict[Need, Observer | None] = {}
        self._index = None
        if self.rows is not None:
            self._index = torch.tensor(self.rows, device=self.seeds.device)
        self.length = self._fixed("length", lambda: self._own(self.cache.lengths()))
        self.spread = len(self.budget) > len(self.length)
        if self.spread:
            self.length = self.length.expand(len(self.budget))
        self.mean = torch.tensor(self.budget, device=self.length.device)
        self._changes = Changes()
        noted_weight = partial(_noted, self.info.output_weight, self._changes)
        self._shown_model = replace(self.info, output_weight=noted_weight)

    def _fixed(self, field_name: str, make_tensor: Callable[[], Tensor], *field_key: Hashable) -> Tensor:
        """Create a field of the views, once for all cells if they share their inputs."""
        return (
            make_tensor()
            if self.shared is None
            else self.shared.ledger.once((field_name, *field_key), field_name, make_tensor)
        )

    def _own(self, tensor: Tensor) -> Tensor:
        """Select the sequences of this eviction step."""
        return tensor if self._index is None else tensor[self._index.to(tensor.device)]

    def _marked(self, marked_columns: Tensor | None, entry_columns: Tensor) -> Tensor:
        """Return the mask of entries in marked columns (bool `[B, S]`; None: no column), `[B, H, n]`."""
        if marked_columns is None:
            return torch.zeros_like(entry_columns, dtype=torch.bool)
        sequence_columns = self._own(marked_columns).to(entry_columns.device)
        return sequence_columns[:, None].expand(-1, entry_columns.shape[1], -1).gather(-1, entry_columns)

    def view(self, layer: RaggedLayer, layer_index: int) -> View:
        """Return the view of one layer in its current state.

        Args:
            layer: A dense or packed layer.
            layer_index: Its index among the full-attention layers.

        Raises:
            Exception: An observer that the policy needs has failed.
        """
        return self._packed([layer], [layer_index]) if layer.packed else self._dense([layer], (layer_index,))

    def several(self, layer_indices: Sequence[int]) -> View:
        """Return one view of several layers of equal shapes; its sequences are those of one layer after another.

        Raises:
            LayerNeeded: What was observed has several shapes.
            Exception: An observer that the policy needs has failed.
        """
        layers = [self.cache.ragged[layer_index] for layer_index in layer_indices]
        return self._packed(layers, layer_indices) if layers[0].packed else self._dense(layers, tuple(layer_indices))

    def _dense(self, layers: Sequence[RaggedLayer], layer_indices: tuple[int, ...]) -> View:
        """Return a view of dense layers. Only several layers need copies of their K and V, once for all cells."""
        token_mask, count = self.cache.valid, len(layers)
        assert token_mask is not None
        keys, values = [layer.key for layer in layers], [layer.value for layer in layers]
        key = self._fixed("key", lambda: joined([self._own(key) for key in keys if key is not None]), layer_indices)
        value = self._fixed("value", lambda: joined([self._own(v) for v in values if v is not None]), layer_indices)
        device, entry_shape = key.device, key.shape[:3]
        own_shape = (len(key) // count, *entry_shape[1:])  # of one layer; all have the same columns
        own_columns = torch.arange(entry_shape[2], device=device).expand(own_shape)
        score = self.policy.score
        extras = {
            field_name: torch.zeros(entry_shape, dtype=dtype, device=device)
            for field_name, dtype in ({} if score is None else score.extras).items()
        }
        observations = {
            need: self._fixed(f"obs[{need}]", partial(self._observed, need, layer_indices, own_columns), layer_indices)
            for need in self.policy.needs
        }

        def by_layer(field_name: str, make_tensor: Callable[[], Tensor]) -> Tensor:
            """Make a field of one layer, which is the same for all, once for all layers of this shape."""
            return self._fixed(field_name, lambda: repeated(make_tensor(), count), device, entry_shape)

        length, seed, budget = (
            repeated(tensor[: own_shape[0]].to(device), count)
            for tensor in (self.length, self._own(self.seeds), self.mean)
        )
        return self._shown(
            View(
                layer=layer_indices,
                moment=self.moment,
                length=length,
                col=by_layer("col", lambda: own_columns),
                position=by_layer("position", lambda: self.cache.positions(own_columns, self._index)),
                valid=by_layer("valid", lambda: self._own(token_mask).to(device)[:, None].expand(own_shape)),
                key=key,
                value=value,
                obs=observations,
                extras=extras,
                model=self._shown_model,
                scale=layers[0].scale,
                seed=seed,
                budget=budget,
                turns_ago=by_layer("turns_ago", lambda: self._turns_ago(own_columns)),
                visual=by_layer("visual", lambda: self._marked(self.cache.visual, own_columns)),
                pruned=by_layer("pruned", lambda: self._marked(self.cache.pruned, own_columns)),
                final=self.final,
                coming=self.coming,
                asked=self.cache.asked,
                window_sums=self._window_sums,
                share=None if self.shared is None else self._once,
            )
        )

    def _packed(self, layers: Sequence[RaggedLayer], layer_indices: Sequence[int]) -> View:
        """Return a view of packed layers, padded to the longest segment."""
        width = max(layer.longest(self.rows) for layer in layers)
        padded = [layer.padded_rows(self.rows, width) for layer in layers]
        self.row_indices |= {index: rows for index, (rows, _) in zip(layer_indices, padded, strict=True)}
        layer_rows = [(layer, rows) for layer, (rows, _) in zip(layers, padded, strict=True)]
        keys, values = zip(*(layer.read(rows, self.rows) for layer, rows in layer_rows), strict=True)
        key, value = joined(keys), joined(values)
        layer_columns = [layer.col[rows].long() for layer, rows in layer_rows]
        entry_columns = joined(layer_columns)
        count = len(layers)
        own_columns = entry_columns  # [B, L * H, n]
        if count > 1:
            own_columns = entry_columns.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)

        def by_layer(entries: Tensor) -> Tensor:
            return entries if count == 1 else entries.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)

        observations: dict[Need, Tensor] = {}
        for need in self.policy.needs:
            parts = [
                self._observed_entries(need, layer, layer_index, columns, rows)
                for layer_index, columns, (layer, rows) in zip(layer_indices, layer_columns, layer_rows, strict=True)
            ]
            found = [part for part in parts if part is not None]
            if 0 < len(found) < count:
                raise LayerNeeded
            if found:
                observations[need] = joined(found)
        own = (self.length, self._own(self.seeds), self.mean)
        length, seed, budget = (joined([tensor.to(key.device)] * count) for tensor in own)
        return self._shown(
            View(
                layer=layer_indices,
                moment=self.moment,
                length=length,
                col=entry_columns,
                position=by_layer(self.cache.positions(own_columns, self._index)),
                valid=joined([live for _, live in padded]),
                key=key,
                value=value,
                obs=observations,
                extras={
                    name: joined([layer.extras[name][rows] for layer, rows in layer_rows])
                    for name in layers[0].extras
                    if isinstance(name, str)
                },
                model=self._shown_model,
                scale=layers[0].scale,
                seed=seed,
                budget=budget,
                turns_ago=by_layer(self._turns_ago(own_columns)),
                visual=by_layer(self._marked(self.cache.visual, own_columns)),
                pruned=by_layer(self._marked(self.cache.pruned, own_columns)),
                final=self.final,
                coming=self.coming,
            )
        )

    def _shown(self, view: View) -> View:
        """Record the tensors of a view, which the policy must not modify; the ledger watches those of a prefill."""
        for field_label, tensor in view.tensors():
            if self.shared is None or field_label in _PER_POLICY:
                self._changes.show(field_label, tensor)
        return view

    def untouched(self) -> None:
        """Check that the policy did not modify its inputs, which other cells use too.

        Raises:
            BudgetError: The policy changed a tensor of the view in place.
        """
        self._check_changes()
        self._changes.forget()

    def _check_changes(self) -> None:
        if changed_name := self._changes.first():
            raise BudgetError(f"{self.policy} changed {changed_name} in place; change a copy instead")

    def channel_queries(self, layer_index: int) -> Tensor:
        """Return the queries that choose key channels in a layer, `[B, H_q, w, d]`."""
        return self._own(self.cache.observers[CHANNEL_QUERIES].read(layer_index))

    def _once(self, layer_indices: tuple[int, ...], tensor_name: Hashable, make_tensor: Callable[[], Tensor]) -> Tensor:
        """Implement `View.once`."""
        assert self.shared is not None
        made_key = layer_indices, tensor_name
        cached = self.shared.made.get(made_key)
        if cached is None:
            started = now(self.length.device)
            cached = make_tensor(), now(self.length.device) - started
            self.shared.made[made_key] = cached
            self.shared.ledger.add(str(tensor_name), cached[0])
            self.shared_seconds += cached[1]
        else:
            self.saved += cached[1]
        self._changes.show(str(tensor_name), cached[0])
        return cached[0]

    def _observed(self, need: Need, layer_indices: Sequence[int], entry_columns: Tensor) -> Tensor:
        """Return the observation of a need in some layers, whose entries have the same columns, `[B, H, n]`."""
        if need in self.cache.broken:
            raise self.cache.broken[need]
        if need.of_tokens:
            assert self.cache.valid is not None
            surprisal = self._own(self.cache.token_observers[need].read(self.cache.valid)).to(entry_columns.device)
            of_entries = surprisal[:, None].expand(-1, entry_columns.shape[1], -1).gather(-1, entry_columns)
            return repeated(of_entries, len(layer_indices))
        observer = self.cache.observers[need]
        return joined([self._own(observer.read(layer_index)) for layer_index in layer_indices])

    def _window_sums(self, window: int, layer_indices: tuple[int, ...]) -> Tensor | None:
        """Return a copy of what entries of some layers receive from the last queries, if the prefill has summed it."""
        observer = self.cache.observers[Queries(window)]
        if not isinstance(observer, QueryObserver):
            return None
        sums = [observer.last(layer_index).window_sums for layer_index in layer_indices]
        known = [self._own(layer_sums) for layer_sums in sums if layer_sums is not None]
        return torch.cat(known) if len(known) == len(sums) else None

    def _observed_entries(
        self, need: Need, layer: RaggedLayer, layer_index: int, entry_columns: Tensor, row_indices: Tensor
    ) -> Tensor | None:
        """Return the observation of a need in a packed layer; None if it was only observed during prefill."""
        if need.per_entry and need not in self.cache.broken:
            if need not in layer.extras:
                return None
            extra_rows = layer.extras[need][row_indices]
            return extra_rows if extra_rows.dim() == 3 else extra_rows.transpose(2, 3).flatten(1, 2)
        if not need.of_tokens and (alone := self._observer_of_one(need)) is not None:
            return alone.read(layer_index)
        return self._observed(need, (layer_index,), entry_columns)

    def _observer_of_one(self, need: Need) -> Observer | None:
        """Return the observer of the only sequence to view; None if it cannot be separated, or there are others.

        On a CPU every sequence is evicted from alone, and reading what was observed of all takes time for each of them.
        """
        if self.rows is None or len(self.rows) > 1 or self.cache.batch == 1:
            return None
        if need not in self._separated:
            observer, (row,) = self.cache.observers[need], self.rows
            alone = observer.sequence(row, int(self.length[0])) if isinstance(observer, Separable) else None
            self._separated[need] = alone
        return self._separated[need]

    def _turns_ago(self, entry_columns: Tensor) -> Tensor:
        """Return how many turns before the newest one each entry was added; 0 outside dialogues."""
        turn_starts = self.cache.turns
        if not any(turn_starts):
            return torch.zeros_like(entry_columns)
        sequence_turns = turn_starts if self.rows is None else [turn_starts[sequence_row] for sequence_row in self.rows]
        turn_ages = torch.zeros_like(entry_columns)
        for turn_index in range(max(len(sequence_row) for sequence_row in sequence_turns)):
            first_columns = torch.tensor(
                [sequence_row[turn_index] if turn_index < len(sequence_row) else 0 for sequence_row in sequence_turns],
                device=entry_columns.device,
            )
            turn_ages += entry_columns < first_columns[:, None, None]
        return turn_ages


def _noted(read_weight: Callable[[int], Tensor], changes: Changes, layer_index: int) -> Tensor:
    """Return a copy of a layer's output projection; writes to it by the policy are detected."""
    weight_copy = read_weight(layer_index)
    changes.show("model.output_weight", weight_copy)
    return weight_copy


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Join the tensors of several layers, one layer after another.

    Raises:
        LayerNeeded: They have several shapes or dtypes.
    """
    if len(parts) == 1:
        return parts[0]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise LayerNeeded
    return torch.cat(list(parts))


class Flags(NamedTuple):
    """Whether an error has occurred in each of some layers, bool `[layers]`, and its message for each of them."""

    messages: list[str]
    errors: Tensor


class CachedScores(NamedTuple):
    """Scores of one layer that later cells can copy, their computation time in seconds, and whether they are wrong."""

    scores: Scores
    extras: dict[str, Tensor]
    seconds: float
    flags: Flags


@dataclass
class PrefixCache:
    """State shared by the cells of one prefill.

    Attributes:
        ledger: Checksums of all tensors passed to the cells.
        scores: Scores by (layers, score).
        made: Results of `View.once` and their computation time in seconds, by (layers, name).
    """

    ledger: Ledger
    scores: dict[tuple[tuple[int, ...], Score], CachedScores] = field(default_factory=dict)
    made: dict[tuple[tuple[int, ...], Hashable], tuple[Tensor, float]] = field(default_factory=dict)


class Changes:
    """The tensors passed to a policy, with their write counters before the call."""

    def __init__(self) -> None:
        self._shown: list[tuple[object, Tensor, int]] = []

    def show(self, tensor_name: object, tensor: Tensor) -> None:
        """Record a tensor before the policy receives it."""
        if not tensor.is_inference():  # such a tensor has no version
            self._shown.append((tensor_name, tensor, tensor._version))

    def forget(self) -> None:
        """Discard all recorded tensors."""
        self._shown.clear()

    def first(self) -> str:
        """Return the name of the first changed tensor, or ""."""
        return next(
            (
                str(tensor_name)
                for tensor_name, tensor, first_version in self._shown
                if tensor._version != first_version
            ),
            "",
        )
