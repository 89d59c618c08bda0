"""Wrappers that monitor scores and readers, for `kvbench check`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvbench.errors import BudgetError
from kvbench.plugin import Blocks, ModelInfo, Need, Reader, Score, Scores, View
from kvbench.view.shown import checked_scores


class Failed(Exception):
    """A violated invariant."""


@dataclass(frozen=True)
class ScoreProbe(Score):
    """Wraps a score and records values that are not finite and inputs modified in place."""

    inner: Score
    problems: list[str] = field(default_factory=list, compare=False)
    snapshots: list[tuple[str, Tensor, Tensor]] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        # The engine accesses these class attributes through the instance.
        object.__setattr__(self, "extras", self.inner.extras)
        object.__setattr__(self, "nonnegative", self.inner.nonnegative)

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        return replace(self, inner=self.inner.stand_in(model, folder))

    def score(self, v: View) -> Scores:
        self.settle()
        self.snapshots[:] = [(str(tensor_name), tensor, tensor.clone()) for tensor_name, tensor in v.tensors()]
        v.share(self._once)
        try:
            scores = checked_scores(self.inner.score(v), v)
        except BudgetError as error:
            raise Failed(f"layer {v.layer}: {error}") from error
        score_values = scores.value
        bad_count = int((~score_values.isfinite() & v.valid).sum())
        if bad_count:
            self.problems.append(f"{bad_count} of {int(v.valid.sum())} scores of layer {v.layer} are not finite")
            score_values = score_values.nan_to_num(0.0, 0.0, 0.0)
        return replace(scores, value=score_values)

    def _once(self, tensor_name: Hashable, make_tensor: Callable[[], Tensor]) -> Tensor:
        tensor = make_tensor()
        self.snapshots.append((str(tensor_name), tensor, tensor.clone()))
        return tensor

    def settle(self) -> None:
        """Compare the tensors of the last view with their snapshots."""
        self.problems.extend(
            f"{tensor_name} was modified in place"
            for tensor_name, tensor, snapshot in self.snapshots
            if not torch.equal(tensor, snapshot)
        )
        self.snapshots.clear()


@dataclass(frozen=True)
class ReaderProbe(Reader):
    """Wraps a reader, as `ScoreProbe` wraps a score."""

    inner: Reader
    problems: list[str] = field(default_factory=list, compare=False)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        return replace(self, inner=self.inner.stand_in(model, folder))

    def block(self, model: ModelInfo) -> int:
        return self.inner.block(model)

    def rate(self, v: Blocks) -> Tensor:
        self.inner.summary(v.model)
        field_names = ("query", "key", "position", "query_position")
        inputs: dict[str, Tensor] = {field_name: getattr(v, field_name) for field_name in field_names}
        snapshots = {field_name: tensor.clone() for field_name, tensor in inputs.items()}
        ratings = self.inner.rate(v)
        changed_names = [field_name for field_name, tensor in inputs.items() if not tensor.equal(snapshots[field_name])]
        self.problems.extend(f"{field_name} was modified in place" for field_name in changed_names)
        if bad_count := int((~ratings.isfinite()).sum()):
            self.problems.append(f"{bad_count} of {ratings.numel()} ratings of layer {v.layer} are not finite")
        return ratings.nan_to_num(0.0, 0.0, 0.0)

    def settle(self) -> None: ...
