"""Scores and readers that watch others, for `kvbench check`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvbench.plugin import Blocks, ModelInfo, Need, Reader, Score, Scores, View


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

    def score(self, v: View) -> Scores | Tensor:
        self.settle()
        inputs = {"key": v.key, "value": v.value, "col": v.col, "valid": v.valid}
        inputs |= {"position": v.position, "length": v.length}
        inputs |= {f"obs[{need}]": seen for need, seen in v.obs.items()}
        self.shown[:] = [(name, x, x.clone()) for name, x in inputs.items()]
        found = self.inner.score(v)
        value = found.value if isinstance(found, Scores) else found
        if not value.is_floating_point():
            kind = str(value.dtype).removeprefix("torch.")
            raise Failed(
                f"scores of layer {v.layer} are {kind}, not floating-point; convert them, for "
                "example with .float()"
            )
        if value.shape != v.shape:
            raise Failed(f"scores have shape {list(value.shape)}, not [B, H, n] {list(v.shape)}")
        bad = int((~value.isfinite() & v.valid).sum())
        if bad:
            self.found.append(
                f"{bad} of {int(v.valid.sum())} scores of layer {v.layer} are not finite"
            )
            value = value.nan_to_num(0.0, 0.0, 0.0)
        return replace(found, value=value) if isinstance(found, Scores) else value

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
        inputs = {"query": v.query, "key": v.key}
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
