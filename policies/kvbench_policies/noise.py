"""Random eviction: the baseline that every method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Score, View


@dataclass(frozen=True)
class Noise(Score):
    """Uniform noise in [0, 1), fixed by (run seed, context, layer, head, position)."""

    name: ClassVar[str] = "random"
    nonnegative: ClassVar[bool] = True

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        return v.noise()


RANDOM = Policy(
    name="random",
    score=Noise(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps random entries (seeded)",
    paper="a control; no paper",
    moments=("context", "question", "decode"),
    cost="time and memory O(H T)",
)
