"""Scores and readers that watch others, for `kvbench check`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvbench.errors import BudgetError
from kvbench.plugin import Blocks, ModelInfo, Need, Reader, Score, Scores, View
from kvbench.view.scores import checked_scores


class Failed(Exception):
    """An invariant that does not hold."""


@dataclass(frozen=True)
class ScoreProbe(Score):
    """A score that watches another: are its values finite, do its inputs stay as they were?"""

    inner: Score
    found: list[str] = field(default_factory=list, compare=False)
    shown: list[tuple[str, Tensor, Tensor]] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        # The engine reads these from the instance, which stands for its class here.
        object.__setattr__(self, "extras", self.inner.extras)
        object.__setattr__(self, "nonnegative", self.inner.nonnegative)

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        return replace(self, inner=self.inner.stand_in(model, folder))

    def score(self, v: View) -> Scores:
        self.settle()
        self.shown[:] = [(str(name), x, x.clone()) for name, x in v.tensors()]
        v.share(self._once)
        try:
            found = checked_scores(self.inner.score(v), v)
        except BudgetError as error:
            raise Failed(f"layer {v.layer}: {error}") from error
        value = found.value
        bad = int((~value.isfinite() & v.valid).sum())
        if bad:
            self.found.append(
                f"{bad} of {int(v.valid.sum())} scores of layer {v.layer} are not finite"
            )
            value = value.nan_to_num(0.0, 0.0, 0.0)
        return replace(found, value=value)

    def _once(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        made = make()
        self.shown.append((str(name), made, made.clone()))
        return made

    def settle(self) -> None:
        """Compare what the last view showed with what it was."""
        self.found.extend(
            f"{name} was changed in place" for name, x, was in self.shown if not torch.equal(x, was)
        )
        self.shown.clear()


@dataclass(frozen=True)
class ReaderProbe(Reader):
    """A reader that watches another, as `ScoreProbe` watches a score."""

    inner: Reader
    found: list[str] = field(default_factory=list, compare=False)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        return replace(self, inner=self.inner.stand_in(model, folder))

    def block(self, model: ModelInfo) -> int:
        return self.inner.block(model)

    def rate(self, v: Blocks) -> Tensor:
        self.inner.summary(v.model)
        names = ("query", "key", "position", "query_position")
        inputs: dict[str, Tensor] = {name: getattr(v, name) for name in names}
        was = {name: x.clone() for name, x in inputs.items()}
        rating = self.inner.rate(v)
        changed = [name for name, x in inputs.items() if not x.equal(was[name])]
        self.found.extend(f"{name} was changed in place" for name in changed)
        if bad := int((~rating.isfinite()).sum()):
            self.found.append(
                f"{bad} of {rating.numel()} ratings of layer {v.layer} are not finite"
            )
        return rating.nan_to_num(0.0, 0.0, 0.0)

    def settle(self) -> None: ...
