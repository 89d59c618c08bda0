"""ZigZagKV: layers share the budget by how many entries hold most of their attention.

Zhong, Liu, Zhang, Lei, Gao, Hu, Chen, Zhang: ZigZagKV: Dynamic KV Cache Compression for Long-context Modeling based on
Layer Uncertainty, arXiv 2412.09036, equation 6. The authors have published no code. Here the attention is that of
SnapKV's window, and the size of the bound is kvbench's choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.parts import TopK
from kvbench.plugin import Allocator, Need, Policy, Queries, Range, Scored, View
from kvbench_policies.layer_shares import measured, spread_by_weight
from kvbench_policies.ranges import check_count, check_share
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class LayerUncertainty(Allocator):
    """Layers share the budget by the number of entries that hold `mass` of their attention.

    Let `m_{l,g}` be the smallest number of entries that receive the fraction `mass` of the mean attention of the last
    `window` queries of query head `g`. With its mean `m_l` over the heads of a layer, and `b_0 = bound * b`:

        n_l = b_0 + (b - b_0) L m_l / sum_k m_k

    All heads of a layer get the same budget, at most the `T` tokens of the context; the excess goes to the other layers
    in proportion. `m` is measured during the prefill: at moment `decode`, a cache that was compressed before keeps its
    per-head budgets.

    Attributes:
        mass: Fraction of the attention that the entries must hold.
        bound: Fraction of the budget that is distributed evenly first.
        window: Number of observing queries, in tokens.
    """

    name: ClassVar[str] = "zigzagkv"
    searched: ClassVar[Mapping[str, Range]] = {
        "mass": Range(0.5, 0.99),
        "bound": Range(0.0, 1.0),
        "window": Range(2, 128, log=True),
    }
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    mass: float = 0.9
    bound: float = 0.2
    window: int = 32

    def __post_init__(self) -> None:
        check_share("mass", self.mass)
        check_share("bound", self.bound)
        check_count("window", self.window, 1)

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Distribute a total (int64 `[B]`) over the heads of all layers, int64 `[B, L, H]`."""
        layer_weights = measured(layers, self, self._entries)
        head_count = len(layers) * layers[0].view.model.kv_heads
        return spread_by_weight(layers, layer_weights, self.bound * total.double() / head_count, total)

    def _entries(self, view: View) -> Tensor:
        """Return `m` of one layer, float64 `[B]`."""
        attention = view.window_attention_sum(self.window).double()
        cumulative = attention.sort(dim=-1, descending=True).values.cumsum(-1)
        entry_counts = (cumulative < self.mass * cumulative[..., -1:]).sum(-1) + 1
        return entry_counts.double().mean(1)


ZIGZAGKV = Policy(
    name="zigzagkv",
    score=WindowAttention(),
    allocate=LayerUncertainty(),
    select=TopK(),
    summary="SnapKV's scores; layer budgets in proportion to how many entries hold 90% of the attention",
    paper="arXiv 2412.09036, equation 6",
    moments=("context", "question", "decode"),
    cost="time O(H_q T (w d + log T)), memory O(H_q w T + H T d); all layers are held until the prefill ends",
)
