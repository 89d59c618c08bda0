"""Ada-PyramidKV: PyramidKV's budgets per layer and, within each layer, AdaKV's budgets per head.

arXiv 2407.11550 on arXiv 2406.02069; see `adakv` and `pyramidkv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.parts import TopK
from kvbench.plugin import ModelInfo, Policy, Range
from kvbench_policies.adakv import HeadAdaptive
from kvbench_policies.pyramidkv import check_pyramid, pyramid_shares
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class AdaPyramid(HeadAdaptive):
    """Pyramid-shaped layer budgets, head-adaptive within each layer; `b` is the layer's own mean budget.

    Attributes:
        steepness: See `pyramidkv.Pyramid`.
        window: See `pyramidkv.Pyramid`.
    """

    name: ClassVar[str] = "ada_pyramid"
    searched: ClassVar[Mapping[str, Range]] = {
        **HeadAdaptive.searched,
        "steepness": Range(1.0, 50.0, log=True),
        "window": Range(2, 128, log=True),
    }
    steepness: float = 20.0
    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pyramid(self.steepness, self.window)

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Return the entries per layer, int64 `[B, L]`, summing to `L * H * b`."""
        head_shares = pyramid_shares(model.layers, length, budget, self.steepness, self.window)
        return head_shares * model.kv_heads


ADA_PYRAMIDKV = Policy(
    name="ada_pyramidkv",
    score=WindowAttention(),
    allocate=AdaPyramid(),
    select=TopK(),
    summary="SnapKV's scores; pyramid-shaped layer budgets, shared adaptively by the heads of a layer",
    paper="arXiv 2407.11550, Algorithms 1 and 2, on arXiv 2406.02069",
    cost="time O(w T d + H T log(H T)), memory O(w T), as adakv",
)
