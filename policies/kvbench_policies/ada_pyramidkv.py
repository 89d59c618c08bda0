"""Ada-PyramidKV: PyramidKV's shares of the layers, and within each layer AdaKV's of the heads.

arXiv 2407.11550 on arXiv 2406.02069; see `adakv` and `pyramidkv`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.parts import TopK
from kvbench.plugin import ModelInfo, Policy
from kvbench_policies.adakv import HeadAdaptive
from kvbench_policies.pyramidkv import check_pyramid, pyramid_shares
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class AdaPyramid(HeadAdaptive):
    """A pyramid over the layers, then head-adaptive within each; `b` is the layer's own share.

    Attributes:
        steepness: See `pyramidkv.Pyramid`.
        window: See `pyramidkv.Pyramid`.
    """

    name: ClassVar[str] = "ada_pyramid"
    steepness: float = 20.0
    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pyramid(self.steepness, self.window)

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Spread the total over layers, int64 `[B, L]` summing to `L * H * b`."""
        head_shares = pyramid_shares(model.layers, length, budget, self.steepness, self.window)
        return head_shares * model.kv_heads


ADA_PYRAMIDKV = Policy(
    name="ada_pyramidkv",
    score=WindowAttention(),
    allocate=AdaPyramid(),
    select=TopK(),
    summary="SnapKV's scores; a pyramid over layers, and the heads of a layer share its budget",
    paper="arXiv 2407.11550, Algorithms 1 and 2, on arXiv 2406.02069",
    cost="time O(w T d + H T log(H T)), memory O(w T), as adakv",
)
