"""HeadKV: per-head budgets from an offline profile of how much each head retrieves.

Fu, Cai, Asi, Xiong, Dong, Xiao: Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated
Retrieval and Reasoning, arXiv 2410.19258, with SnapKV's window attention as the score. `kvbench profile heads` measures
the profile of a model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import TopK, apportion, fill, largest_remainder
from kvbench.plugin import ModelInfo, Policy, Scored
from kvbench.profiles.allocators import Profiled
from kvbench_policies.ranges import check_count, check_finite
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class HeadProfileShares(Profiled):
    """A window and a base budget for every head, plus a pool divided in proportion to the profile `p`.

    With `b' = b - w`, `beta >= 1` and `p` raised to `temp` and renormalised:

        n[l, h] = (b' - b'/beta) + (b'/beta) * L * H * p[l, h] + w

    A window larger than `b` shrinks to `b`. No head gets more than the context's `T` tokens: the excess goes to the
    heads below `T` in proportion to `p`, or evenly if their `p` is 0. Budgets are rounded by largest remainder over the
    whole model. If a layer's total differs from this plan (at decode, when the layer holds fewer entries), its heads
    divide it in the plan's proportions.

    Attributes:
        pool_share: Size of the pool: up to 1, the fraction `1/beta` of `b'`; above 1, the paper's `beta` itself. 1.01
            and 0.990099 are equivalent.
        temp: Exponent of the profile; 0 gives even budgets.
        window: `w`, the number of tokens that every head gets first; also a parameter of the score.
    """

    name: ClassVar[str] = "head_profile"
    scope: ClassVar[Literal["head", "layer", "model"]] = "layer"
    pool_share: float = 1.01
    temp: float = 1.0
    window: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.pool_share < float("inf"):
            raise UserError(
                f"pool_share={self.pool_share} is out of range; use a fraction above 0 and up to 1, "
                "or the paper's beta above 1"
            )
        check_finite("temp", self.temp, 0)
        check_count("window", self.window, 0)

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Return the entries per layer, int64 `[B, L]`, summing to `L * H * b`."""
        return self.plan(model, length, budget).sum(-1)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Distribute a layer's total (int64 `[B]`) over its heads, int64 `[B, 1, H]`."""
        ((view, _),) = layers
        planned_shares = self.plan(view.model, view.length, view.budget)[:, view.layer]
        return apportion(planned_shares.double(), total, view.valid.sum(-1))[:, None]

    def plan(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Return the entries per head, int64 `[B, L, H]`.

        Args:
            model: Shapes of the model.
            length: `T` of every sequence, int64 `[B]`.
            budget: `b` of every sequence, int64 `[B]`.
        """
        profile = self.load_profile(model)
        pool_share = self.pool_share if self.pool_share <= 1 else 1 / self.pool_share
        lengths, budgets = tuple(length.tolist()), tuple(budget.tolist())
        head_plan = _plan(profile.scores, pool_share, self.temp, self.window, lengths, budgets)
        return head_plan.to(length.device)


@functools.lru_cache(maxsize=32)
def _plan(
    head_scores: tuple[tuple[float, ...], ...],
    pool_share: float,
    temperature: float,
    window_size: int,
    lengths: tuple[int, ...],
    budgets: tuple[int, ...],
) -> Tensor:
    """Compute the plan of `HeadProfileShares`, cached for all layers of an eviction step; read-only, on the CPU."""
    probabilities = torch.tensor(head_scores, dtype=torch.float64)
    layer_count, head_count = probabilities.shape
    probabilities = (probabilities / probabilities.max()).flatten() ** temperature
    probabilities = (probabilities / probabilities.sum()).expand(len(lengths), -1)
    mean_shares = torch.tensor(budgets)
    capacity = torch.tensor(lengths)[:, None].expand_as(probabilities)
    total_entries = mean_shares * layer_count * head_count
    window_shares = mean_shares.clamp(max=window_size)
    base_shares = ((mean_shares - window_shares) * (1.0 - pool_share) + window_shares)[:, None].double()
    # If no head is at its cap, this is the formula itself; otherwise the excess goes to the other heads in proportion
    # to p.
    exact_shares = base_shares + fill(
        probabilities,
        total_entries.double() - base_shares[:, 0] * layer_count * head_count,
        capacity - base_shares,
    )
    return largest_remainder(exact_shares, total_entries, capacity).view(-1, layer_count, head_count)


HEADKV = Policy(
    name="headkv",
    score=WindowAttention(),
    allocate=HeadProfileShares(),
    select=TopK(),
    summary="SnapKV's scores; per-head budgets from a profile of how much each head retrieves",
    paper="arXiv 2410.19258",
    moments=("context", "question"),
    cost="time O(w T d), memory O(w T)",
)
