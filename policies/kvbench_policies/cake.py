"""CAKE: layers share the budget by the entropy and the variance of their attention.

Qin, Cao, Lin, Hu, Fan, Cheng, Lin, Li: CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, arXiv
2503.12491, with gamma = 200 and pooling over 5 entries as in the authors' code. The paper tunes the exponents per model
and cache size; the code defaults to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import TopK
from kvbench.plugin import Allocator, Need, Policy, Queries, Range, Scored, Scores, View, protect_window
from kvbench_policies.layer_shares import measured, spread_by_weight
from kvbench_policies.ranges import check_count, check_finite
from kvbench_policies.windows import WindowScore


@dataclass(frozen=True)
class MeanAndVariance(WindowScore):
    """Mean attention of the window plus `gamma` times its variance over the window's queries.

        s_i = pool( mean_{g in group}( mean_q A_g[q, i] + gamma Var_q A_g[q, i] ) )  for i < T - w

    with the sample variance and zero-padded average pooling. The window is protected.

    Attributes:
        gamma: Weight of the variance.
        window: Number of observing queries, in tokens; these tokens are protected.
        kernel: Odd width of the pooling over the past, in entries; 1 disables pooling.
    """

    name: ClassVar[str] = "cake"
    searched: ClassVar[Mapping[str, Range]] = {**WindowScore.searched, "gamma": Range(1.0, 1000.0, log=True)}
    nonnegative: ClassVar[bool] = True
    kernel: int = 5
    gamma: float = 200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite("gamma", self.gamma, 0)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the window."""
        before_window = self.past(v)
        attention = v.window_attention(self.window)
        scores = v.grouped(attention.mean(2) + self.gamma * variance(attention))
        scores = self.pooled(scores.masked_fill(~before_window, 0.0), "avg")
        return Scores(scores.masked_fill(~before_window, 0.0), protect_window(v, self.window))


def variance(attention: Tensor) -> Tensor:
    """Return the sample variance over the queries, `[B, H_q, w, n]` to `[B, H_q, n]`; 0 for a single query."""
    return attention.var(2) if attention.shape[2] > 1 else torch.zeros_like(attention[:, :, 0])


@dataclass(frozen=True)
class LayerPreference(Allocator):
    """Layers share the budget beyond the window by entropy and variance of attention.

    With the attention `A` of the window's queries `q` on the past `i < T - w`, over the layer's query heads `g`:

        P_l = (-sum_{g, q, i} A log A)^(1 / tau1) * (sum_{g, i} Var_q A_g[q, i])^(1 / tau2)

        n_l = w + (b - w) L P_l / sum_m P_m

    All heads of a layer get the same budget, at most the `T` tokens of the context; the excess goes to the other layers
    in proportion. Budgets are even if `b <= w`. `P` is measured during the prefill: at moment `decode`, a cache that
    was compressed before keeps its per-head budgets.

    Attributes:
        tau1: Temperature of the entropy; a higher value reduces its influence.
        tau2: Temperature of the variance; a higher value reduces its influence.
        window: `w`, the number of observing queries and of tokens that every head keeps.
    """

    name: ClassVar[str] = "cake"
    searched: ClassVar[Mapping[str, Range]] = {
        "tau1": Range(0.1, 10.0, log=True),
        "tau2": Range(0.1, 10.0, log=True),
        "window": Range(2, 128, log=True),
    }
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    tau1: float = 1.0
    tau2: float = 1.0
    window: int = 32

    def __post_init__(self) -> None:
        for parameter in ("tau1", "tau2"):
            if not 0 < getattr(self, parameter) < float("inf"):
                raise UserError(f"{parameter}={getattr(self, parameter)} is out of range; use more than 0")
        check_count("window", self.window, 1)

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Distribute a total (int64 `[B]`) over the heads of all layers, int64 `[B, L, H]`."""
        log_weights = measured(layers, self, self._log_preference)
        largest_log = log_weights.amax(1, keepdim=True).clamp(min=-1e300)
        window_base = torch.full_like(total, self.window).double()
        return spread_by_weight(layers, (log_weights - largest_log).exp(), window_base, total)

    def _log_preference(self, view: View) -> Tensor:
        """`log P` of one layer, float64 `[B]`."""
        attention = view.window_attention(self.window)
        past_mask = ((view.age >= self.window) & view.valid).repeat_interleave(view.model.group, 1)
        attention = attention.masked_fill(~past_mask[:, :, None], 0.0)
        entropy = -torch.special.xlogy(attention, attention).double().sum((1, 2, 3))
        total_variance = variance(attention).double().sum((1, 2))
        # In the log domain small taus do not overflow; -inf where entropy or variance is 0.
        return entropy.clamp(min=0.0).log() / self.tau1 + total_variance.log() / self.tau2


CAKE = Policy(
    name="cake",
    score=MeanAndVariance(),
    allocate=LayerPreference(),
    select=TopK(),
    summary="attention of the last 32 queries and its variance; layers with spread-out attention keep more",
    paper="arXiv 2503.12491",
    moments=("context", "question", "decode"),
    cost="time O(H_q w T d), memory O(H_q w T + H T d); all layers are held until the prefill ends",
)
