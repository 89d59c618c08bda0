"""HeadKV: heads share the whole cache by how much they retrieve, as an offline profile says.

Fu, Cai, Asi, Xiong, Dong, Xiao: Not All Heads Matter: A Head-Level KV Cache Compression Method with
Integrated Retrieval and Reasoning, arXiv 2410.19258, with SnapKV's window attention as the score.
`kvbench profile heads` makes the profile of a model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import TopK, apportion, fill, largest_remainder
from kvbench.plugin import ModelInfo, Policy, Scored
from kvbench.profiles.allocators import Profiled
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class HeadProfileShares(Profiled):
    """A window and a base for every head, and a pool that is shared by the profile `p`.

    With `b' = b - w`, `beta >= 1` and `p` raised to `temp` and normalised again:

        n[l, h] = (b' - b'/beta) + (b'/beta) * L * H * p[l, h] + w

    A window larger than `b` shrinks to `b`. No head gets more than the context's `T` tokens: the
    excess goes to the heads below `T` in proportion to `p`, evenly where theirs is 0. Rounded by
    largest remainder over the whole model. Where the engine gives a layer another total than this
    plan (a cut at decode, when the layer holds less), its heads share that in the plan's
    proportions.

    Attributes:
        pool_share: Size of the pool: a share `1/beta` of `b'` in (0, 1], or above 1 the paper's
            `beta` itself: 1.01 and 0.990099 are the same.
        temp: Exponent of the profile; 0 shares evenly.
        window: `w`, tokens that every head is sure of; the score's window bears the same name.
    """

    name: ClassVar[str] = "head_profile"
    scope: ClassVar[Literal["head", "layer", "model"]] = "layer"
    pool_share: float = 1.01
    temp: float = 1.0
    window: int = 32

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (self.pool_share > 0 and math.isfinite(self.pool_share)):
            raise UserError(
                f"pool_share={self.pool_share}: a share in (0, 1], or beta above 1, would be right"
            )
        if not (self.temp >= 0 and math.isfinite(self.temp)):
            raise UserError(f"temp={self.temp}: a number, 0 or more, would be right")
        if self.window < 0:
            raise UserError(f"window={self.window}: a number of tokens, 0 or more, would be right")

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Entries of every layer, int64 `[B, L]`, summing to `L * H * b`."""
        return self.plan(model, length, budget).sum(-1)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Spread a layer's total (int64 `[B]`) over its heads, int64 `[B, 1, H]`."""
        ((v, _),) = layers
        mine = self.plan(v.model, v.length, v.budget)[:, v.layer]
        return apportion(mine.double(), total, v.valid.sum(-1))[:, None]

    def plan(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Entries of every head of the model, int64 `[B, L, H]`.

        Args:
            model: The model.
            length: `T` of every sequence, int64 `[B]`.
            budget: `b` of every sequence, int64 `[B]`.
        """
        found = self.load_profile(model)
        share = self.pool_share if self.pool_share <= 1 else 1 / self.pool_share
        made = _plan(
            found.scores,
            share,
            self.temp,
            self.window,
            tuple(length.tolist()),
            tuple(budget.tolist()),
        )
        return made.to(length.device)


@functools.lru_cache(maxsize=32)
def _plan(
    scores: tuple[tuple[float, ...], ...],
    share: float,
    temp: float,
    window: int,
    length: tuple[int, ...],
    budget: tuple[int, ...],
) -> Tensor:
    """The plan of `HeadProfileShares`, once for all layers of a cut (CPU; never written to)."""
    p = torch.tensor(scores, dtype=torch.float64)
    layers, heads = p.shape
    p = (p / p.max()).flatten() ** temp
    p = (p / p.sum()).expand(len(length), -1)
    mean = torch.tensor(budget)
    most = torch.tensor(length)[:, None].expand_as(p)
    total = mean * layers * heads
    own = mean.clamp(max=window)
    base = ((mean - own) * (1.0 - share) + own)[:, None].double()
    # Where no head is at its cap this is the formula as it stands; the pool that caps leave over
    # goes on in proportion to p.
    real = base + fill(p, total.double() - base[:, 0] * layers * heads, most - base)
    return largest_remainder(real, total, most).view(-1, layers, heads)


HEADKV = Policy(
    name="headkv",
    score=WindowAttention(),
    allocate=HeadProfileShares(),
    select=TopK(),
    summary="SnapKV's scores; heads share the cache by a profile of how much they retrieve",
    paper="arXiv 2410.19258",
    moments=("context", "question"),
    cost="time O(w T d), memory O(w T)",
)
