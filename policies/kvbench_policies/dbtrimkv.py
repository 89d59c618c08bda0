"""DBTrimKV: learned retention summed over the next steps and compared across all layers and heads.

Nguyen, Cohan, Ying and others: Make Each Token Count: Towards Improving Long-Context Performance with KV Cache
Eviction, arXiv 2605.09649, section 4 (equation 9; horizon 2 is the paper's default).
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
"""Below this `|horizon * log beta|`, the difference of the `phi` terms comes from its series."""
_LEAST = 1e-38
"""Lower bound of `-log beta`, which keeps an infinite horizon finite."""


def _phi(x: Tensor) -> Tensor:
    """`log(expm1(x) / x)` for negative `x`."""
    return torch.log(torch.expm1(x) / x)


@dataclass(frozen=True)
class LookAhead(Learned):
    """Retention summed over the next `horizon` steps, `G_i = sum_{s=t+1}^{t+horizon} beta_i^(s-i)`.

    Entries are ranked by `log G_i - log horizon`, which gives the same order and stays precise where `log beta` is near
    0:

        s_i = (t + 1 - i) log beta_i + phi(horizon log beta_i) - phi(log beta_i)
        phi(x) = log(expm1(x) / x)

    If `|horizon log beta_i| < 1e-3`, the difference of the `phi` terms is `(horizon - 1) log beta_i / 2`. Computed in
    float64, returned in float32. An infinite horizon (`horizon=0`) is ranked by
    `log G_i = (t + 1 - i) log beta_i - log(1 - beta_i)`. A large finite horizon approximates it only if `|log beta|`
    exceeds `1 / horizon`.

    Attributes:
        horizon: Number of future decode steps that count; 0 means all.
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
        """Return the gates' `log beta`, float32 `[B, H, n]`."""
        return self.learned(v)

    def _steps(self, log_beta: Tensor) -> Tensor:
        """Return the score contributed by the steps after the first, float64 `[B, H, n]`."""
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
    cost="time O(T d_model 512) once for the gate and O(H T) per eviction step, memory O(L H T)",
)
