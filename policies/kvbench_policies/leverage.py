"""Approximate leverage scores of the keys, one of the two parts of Compactor.

Chari, Van Durme: Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate
Leverage Scores, arXiv 2507.08143, as kvpress has it (`LeverageScorePress`, by the first author):
with a ridge of 0.01 and a Cholesky factor instead of a singular value decomposition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.plugin import Score, View
from kvbench.view.rope import angles, turn_back
from kvbench_policies.projections import gaussian
from kvbench_policies.ranges import check_count

_RIDGE = 1e-2
"""Added to the diagonal of the Gram matrix, so that it can be inverted for any keys."""

_BLOCK = 1 << 22
"""Number of key channels that are turned back at once for each sequence, in float32."""


def leverage(v: View, rated: Tensor, sketch: int) -> Tensor:
    """How far the key of every entry stands out among the others.

        X = (K - mean K) Phi,    l_i = x_i (X^T X + 0.01 I)^-1 x_i^T

    `K` are the keys before RoPE: the cached ones, turned back. `Phi` is `d x sketch` with entries
    drawn from N(0, 1/sketch) for every context, layer and head.

    Args:
        v: The layer.
        rated: The entries that are compared, bool `[B, H, n]`.
        sketch: Dimensions that `Phi` projects to; 0 projects nothing.

    Returns:
        float32 `[B, H, n]`, from 0 to 1; 0 for the other entries.
    """
    batch, heads, n = v.shape
    dim = v.key.shape[-1]
    projection = gaussian(v, dim, sketch) / sketch**0.5 if sketch else None
    x = torch.empty(batch, heads, n, sketch or dim, device=v.key.device)
    block = max(1, _BLOCK // (heads * dim))
    for start in range(0, n, block):
        part = slice(start, start + block)
        cos, sin = angles(v.model, v.layer, v.position[..., part])
        key = turn_back(v.key[:, :, part].float(), cos, sin)
        x[:, :, part] = key if projection is None else key @ projection
    others = ~rated[..., None]
    # In float64: the ridge is far smaller than the last bits of a long text's Gram matrix.
    x = x.masked_fill_(others, 0.0).double()
    mean = x.sum(2, keepdim=True) / rated.sum(-1).clamp(min=1)[..., None, None]
    x = (x - mean).masked_fill(others, 0.0)
    turned = x.transpose(-1, -2)
    gram = turned @ x + _RIDGE * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    solved = torch.cholesky_solve(turned, torch.linalg.cholesky_ex(gram).L)
    return (turned * solved).sum(-2).clamp(min=0.0).float()


def standardised(value: Tensor, rated: Tensor) -> Tensor:
    """Subtract the mean and divide by the sample standard deviation over a layer's entries.

    Args:
        value: `[B, H, n]`.
        rated: The entries that count, bool `[B, H, n]`; the others become 0.
    """
    count = rated.sum((1, 2), keepdim=True)
    known = value.double().masked_fill(~rated, 0.0)
    mean = known.sum((1, 2), keepdim=True) / count.clamp(min=1)
    centred = (known - mean).masked_fill(~rated, 0.0)
    spread = (centred.square().sum((1, 2), keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return (centred / spread.clamp(min=1e-6)).float()


@dataclass(frozen=True)
class Leverage(Score):
    """Leverage of every key, standardised over the entries of the layer.

        X = (K - mean K) Phi,    l_i = x_i (X^T X + 0.01 I)^-1 x_i^T

    `K` are the keys before RoPE, `Phi` is `d x sketch` with entries drawn from N(0, 1/sketch) for
    every context, layer and head from the run's seed.

    Attributes:
        sketch: Dimensions that the keys are projected to; 0 takes the keys as they are.
    """

    name: ClassVar[str] = "leverage"
    sketch: int = 48

    def __post_init__(self) -> None:
        """Check the range."""
        check_count("sketch", self.sketch, 0, "dimensions")

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        return standardised(leverage(v, v.valid, self.sketch), v.valid)
