"""PyramidKV: layer budgets decrease linearly from lower to upper layers.

Cai, Zhang, Gao, Y. Liu, T. Liu, Lu, Xiong, Dong, Chang, Hu, Xiao: PyramidKV: Dynamic KV Cache Compression based on
Pyramidal Information Funneling, arXiv 2406.02069. The window counts towards the budget. Unlike in kvpress, a small
budget does not fall back to SnapKV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform, largest_remainder
from kvbench.plugin import ModelInfo, Policy, Range
from kvbench_policies.ranges import check_count, check_finite
from kvbench_policies.snapkv import WindowAttention


def pyramid_shares(layer_count: int, length: Tensor, budget: Tensor, steepness: float, window: int) -> Tensor:
    """Return the entries per head of each layer, decreasing linearly from the first layer.

        b' = b - w,   min = b' / steepness,   max = 2 b' - min
        if max > T - w:   max = T - w,   min = 2 b' - max
        b_l = max - l (max - min) / (L - 1) + w

    Budgets are even if `L = 1`, `b' <= 0` or `T < 2 b'`. They are rounded by largest remainder; ties go to the lower
    layer.

    Args:
        layer_count: Number of layers, `L`.
        length: Tokens of every sequence, `T`, int64 `[B]`.
        budget: Mean entries per (layer, head), `b`, at most `T`, int64 `[B]`.
        steepness: 1 or more; 1 gives even budgets.
        window: `w`, in tokens.

    Returns:
        int64 `[B, L]`, each from 1 to `T`, summing to `L * b`.
    """
    inner_budget = budget - window
    even_mask = (inner_budget <= 0) | (length < 2 * inner_budget)
    largest_share = 2 * inner_budget.double() - inner_budget.double() / steepness
    largest_share = torch.minimum(largest_share, (length - window).double())
    smallest_share = 2 * inner_budget.double() - largest_share
    layer_fraction = torch.arange(layer_count, dtype=torch.float64, device=length.device) / max(1, layer_count - 1)
    exact_shares = largest_share[:, None] - layer_fraction * (largest_share - smallest_share)[:, None] + window
    if layer_count == 1:
        even_mask = torch.ones_like(even_mask)
    exact_shares = torch.where(even_mask[:, None], budget[:, None].double(), exact_shares)
    capacity = length[:, None].expand(-1, layer_count)
    return largest_remainder(exact_shares, layer_count * budget, capacity, 1)


def check_pyramid(steepness: float, window: int) -> None:
    """Validate a pyramid's parameters.

    Raises:
        UserError: A parameter is out of range.
    """
    check_finite("steepness", steepness, 1)
    check_count("window", window, 1)


@dataclass(frozen=True)
class Pyramid(Uniform):
    """Layer budgets that decrease linearly from lower to upper layers; even over the heads of a layer.

    Attributes:
        steepness: The paper's beta: beyond the window, the last layer keeps `1 / steepness` of the mean, and the first
            layer twice the mean minus that.
        window: Number of tokens that every layer keeps; they count towards the budget.
    """

    name: ClassVar[str] = "pyramid"
    searched: ClassVar[Mapping[str, Range]] = {
        "steepness": Range(1.0, 50.0, log=True),
        "window": Range(2, 128, log=True),
    }
    steepness: float = 20.0
    window: int = 32

    def __post_init__(self) -> None:
        check_pyramid(self.steepness, self.window)

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Return the entries per layer, int64 `[B, L]`, summing to `L * H * b`."""
        head_shares = pyramid_shares(model.layers, length, budget, self.steepness, self.window)
        return head_shares * model.kv_heads


PYRAMIDKV = Policy(
    name="pyramidkv",
    score=WindowAttention(),
    allocate=Pyramid(),
    select=TopK(),
    summary="SnapKV's scores; layer budgets decrease linearly from lower to upper layers",
    paper="arXiv 2406.02069",
    moments=("context", "question", "decode"),  # D2O, arXiv 2406.13035, compares them while answers are generated
    cost="time O(w T d), memory O(w T), as snapkv",
)
