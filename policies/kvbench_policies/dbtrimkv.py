"""DBTrimKV: retention summed over the next steps, compared across all layers and heads.

Nguyen, Cohan, Ying and others: Make Each Token Count: Towards Improving Long-Context Performance
with KV Cache Eviction, arXiv 2605.09649, section 4 (equation 9; horizon 2 is the paper's default).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.parts import TopK
from kvbench.plugin import Policy, View
from kvbench_policies.gates.config import Kind
from kvbench_policies.gates.learned import Learned
from kvbench_policies.joint import Global
from kvbench_policies.ranges import check_count

_NEAR = 1e-3
"""If `|horizon * log beta|` is smaller, the difference of the `phi` is taken from its series."""
_LEAST = 1e-38
"""Smallest `-log beta` that is used, so that an endless horizon stays finite."""


def _phi(x: Tensor) -> Tensor:
    """`log(expm1(x) / x)` for negative `x`."""
    return torch.log(torch.expm1(x) / x)


@dataclass(frozen=True)
class LookAhead(Learned):
    """Retention summed over the next `horizon` steps, `G_i = sum_{s=t+1}^{t+horizon} beta_i^(s-i)`.

    Entries are ranked by `log G_i - log horizon`, which gives the same order and stays exact where
    `log beta` is near 0:

        s_i = (t + 1 - i) log beta_i + phi(horizon log beta_i) - phi(log beta_i)
        phi(x) = log(expm1(x) / x)

    If `|horizon log beta_i| < 1e-3`, the difference of the `phi` is `(horizon - 1) log beta_i / 2`.
    Computed in float64, returned in float32. An endless horizon (`horizon=0`) has no mean over its
    steps and is ranked by `log G_i = (t + 1 - i) log beta_i - log(1 - beta_i)`. A large number of
    steps does not replace it while `|log beta|` is smaller than the inverse of that number.

    Attributes:
        horizon: Number of next steps that count, in tokens; 0 means all of them.
    """

    name: ClassVar[str] = "lookahead"
    kind: ClassVar[Kind] = "dbtrimkv"
    horizon: int = 2

    def __post_init__(self) -> None:
        check_count("horizon", self.horizon, 0)

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        log_beta = self.learned(v).double()
        return ((v.age + 1) * log_beta + self._steps(log_beta)).float()

    def log_retention(self, v: View) -> Tensor:
        """The gates' `log beta`, float32 `[B, H, n]`."""
        return self.learned(v)

    def _steps(self, log_beta: Tensor) -> Tensor:
        """The part of the score that steps after the first add, float64 `[B, H, n]`."""
        if self.horizon == 0:
            return -torch.log(-torch.expm1(log_beta.clamp(max=-_LEAST)))
        series_term = (self.horizon - 1) * log_beta / 2
        clamped = log_beta.clamp(max=-_NEAR / self.horizon)
        return torch.where(
            self.horizon * log_beta > -_NEAR,
            series_term,
            _phi(self.horizon * clamped) - _phi(clamped),
        )


DBTRIMKV = Policy(
    name="dbtrimkv",
    score=LookAhead(),
    allocate=Global(),
    select=TopK(),
    summary="learned decay as in TRIM-KV, summed over the next 2 steps; one top-N over all heads",
    paper="arXiv 2605.09649, section 4, equation 9",
    moments=("context", "question", "decode", "turns"),
    cost="time O(T d_model 512) once for the gate and O(H T) a cut, memory O(L H T)",
)
