"""PyramidInfer: keeps what the recent tokens attend to, less in each higher layer.

Yang, Han, Gao, Hu, Zhang, Zhao: PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference, arXiv
2405.12532; schedule and defaults from the authors' code. There, a token that a layer drops is also dropped in all
layers above, which saves prefill time, and the ratios alone determine how much is kept. Here the whole context is
prefilled, every layer selects from all of it, and the ratios distribute the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform, apportion
from kvbench.plugin import ModelInfo, Need, Policy, Queries, Range, Score, Scores, View, protect_sinks, protect_window
from kvbench_policies.ranges import check_count, check_finite, check_share
from kvbench_policies.tova import sum_over_holders


@dataclass(frozen=True)
class RecentAttention(Score):
    """Weighted attention of the last `window` queries, averaged over all query heads of the layer.

        s_i = mean_g mean_{q in window} c_q A_g[q, i],   c_q from 1 to `distance_weight`, linear

    The newest query has the largest weight. A token has the same score in every KV head that holds it, so heads with
    equal budgets keep the same tokens. In the authors' code, the window is 20% of the sequence; here it is a number of
    tokens, because it counts towards the budget.

    Attributes:
        window: Number of observing queries, in tokens; these tokens are protected.
        sinks: Number of protected first tokens.
        distance_weight: Weight of the newest query; the oldest of a full window has weight 1.
    """

    name: ClassVar[str] = "recent_attention"
    searched: ClassVar[Mapping[str, Range]] = {
        "window": Range(2, 128, log=True),
        "sinks": Range(0, 16),
        "distance_weight": Range(0.5, 4.0),
    }
    nonnegative: ClassVar[bool] = True
    window: int = 32
    sinks: int = 4
    distance_weight: float = 1.2

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_count("sinks", self.sinks, 0)
        check_finite("distance_weight", self.distance_weight, 0)

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        query_weights = torch.linspace(1.0, self.distance_weight, self.window, device=v.col.device)
        attention = (v.window_attention(self.window) * query_weights[:, None]).mean(2)
        summed_attention = sum_over_holders(v.grouped(attention, "sum"), v.position, v.valid)
        window_class, sink_class = protect_window(v, self.window), protect_sinks(v, self.sinks)
        return Scores(summed_attention / v.model.query_heads, torch.maximum(window_class, sink_class))


@dataclass(frozen=True)
class CosinePyramid(Uniform):
    """Layer budgets that shrink from each layer to the next; even over the heads of a layer.

        b_0 : b_1 : ... = 1 : r_0 : r_0 r_1 : ...,   r_l = r + (1 - r) (1 + cos(pi l / L)) / 2

    beyond the window, with `r = decay_ratio`: the lowest layers keep nearly equal amounts, and each top layer about `r`
    times the layer below. Budgets are rounded by largest remainder; the excess above `T` goes to the other layers.
    Budgets are even if the mean is not larger than the window.

    Attributes:
        decay_ratio: Ratio of a top layer's budget to that of the layer below, above 0.
        window: Number of tokens that every layer keeps; they count towards the budget.
    """

    name: ClassVar[str] = "cosine_pyramid"
    searched: ClassVar[Mapping[str, Range]] = {"decay_ratio": Range(0.3, 1.0), "window": Range(2, 128, log=True)}
    decay_ratio: float = 0.9
    window: int = 32

    def __post_init__(self) -> None:
        check_share("decay_ratio", self.decay_ratio)
        check_finite("decay_ratio", self.decay_ratio, 0.01)
        check_count("window", self.window, 1)

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Return the entries per layer, int64 `[B, L]`, summing to `L * H * b`."""
        layer_share, layer_shares = 1.0, []
        for layer in range(model.layers):
            layer_shares.append(layer_share)
            cosine_wave = (1 + math.cos(math.pi * layer / model.layers)) / 2
            layer_share *= self.decay_ratio + (1 - self.decay_ratio) * cosine_wave
        layer_weights = torch.tensor(layer_shares, dtype=torch.float64, device=length.device)
        inner_budget = (budget - self.window).clamp(min=0)
        capacity = (length - budget + inner_budget)[:, None].expand(-1, model.layers)
        inner_shares = apportion(layer_weights.expand(len(budget), -1), inner_budget * model.layers, capacity)
        return (inner_shares + (budget - inner_budget)[:, None]) * model.kv_heads


PYRAMIDINFER = Policy(
    name="pyramidinfer",
    score=RecentAttention(),
    allocate=CosinePyramid(),
    select=TopK(),
    summary="keeps the last 32 tokens and what they attend to, less in each higher layer",
    paper="arXiv 2405.12532, section 3; schedule of the authors' code",
    moments=("context", "question", "decode"),
    cost="time O(H_q w T d), memory O(H_q w T + H^2 T)",
)
