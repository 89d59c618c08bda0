"""Approximate leverage scores of the keys, one of Compactor's two terms.

Chari, Van Durme: Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv
2507.08143, as in kvpress (`LeverageScorePress`, by the first author): with a ridge of 0.01 and a Cholesky factor
instead of a singular value decomposition.
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
"""Added to the diagonal of the Gram matrix to keep it invertible."""

_BLOCK = 1 << 22
"""Key channels per block and sequence when RoPE is undone, in float32."""


def leverage(view: View, rated_mask: Tensor, sketch: int) -> Tensor:
    """Return the approximate leverage of every entry's key.

        X = (K - mean K) Phi,    l_i = x_i (X^T X + 0.01 I)^-1 x_i^T

    `K` are the cached keys with RoPE undone. `Phi` is `d x sketch` with entries from N(0, 1/sketch), drawn per context,
    layer and head.

    Args:
        view: View of the layer.
        rated_mask: Entries to compare, bool `[B, H, n]`.
        sketch: Dimensions that `Phi` projects to; 0 disables the projection.

    Returns:
        float32 `[B, H, n]`, from 0 to 1; 0 for entries outside `rated_mask`.
    """
    batch_size, head_count, entry_count = view.shape
    head_dim = view.key.shape[-1]
    projection = gaussian(view, head_dim, sketch) / sketch**0.5 if sketch else None
    features = torch.empty(batch_size, head_count, entry_count, sketch or head_dim, device=view.key.device)
    block_size = max(1, _BLOCK // (head_count * head_dim))
    for block_start in range(0, entry_count, block_size):
        block_slice = slice(block_start, block_start + block_size)
        cosines, sines = angles(view.model, view.layer, view.position[..., block_slice])
        keys = turn_back(view.key[:, :, block_slice].float(), cosines, sines)
        features[:, :, block_slice] = keys if projection is None else keys @ projection
    unrated_mask = ~rated_mask[..., None]
    # In float32, the ridge is lost in the rounding error of a long text's Gram matrix.
    features = features.masked_fill_(unrated_mask, 0.0).double()
    feature_means = features.sum(2, keepdim=True) / rated_mask.sum(-1).clamp(min=1)[..., None, None]
    features = (features - feature_means).masked_fill(unrated_mask, 0.0)
    transposed = features.transpose(-1, -2)
    gram_matrix = transposed @ features + _RIDGE * torch.eye(
        features.shape[-1], dtype=features.dtype, device=features.device
    )
    solution = torch.cholesky_solve(transposed, torch.linalg.cholesky_ex(gram_matrix).L)
    return (transposed * solution).sum(-2).clamp(min=0.0).float()


def standardised(values: Tensor, rated_mask: Tensor) -> Tensor:
    """Subtract the mean and divide by the sample standard deviation over a layer's entries.

    Args:
        values: `[B, H, n]`.
        rated_mask: Entries to include, bool `[B, H, n]`; the others become 0.
    """
    rated_counts = rated_mask.sum((1, 2), keepdim=True)
    rated_values = values.double().masked_fill(~rated_mask, 0.0)
    layer_means = rated_values.sum((1, 2), keepdim=True) / rated_counts.clamp(min=1)
    centred = (rated_values - layer_means).masked_fill(~rated_mask, 0.0)
    deviation = (centred.square().sum((1, 2), keepdim=True) / (rated_counts - 1).clamp(min=1)).sqrt()
    return (centred / deviation.clamp(min=1e-6)).float()


@dataclass(frozen=True)
class Leverage(Score):
    """Leverage of every key, standardised over the entries of the layer.

        X = (K - mean K) Phi,    l_i = x_i (X^T X + 0.01 I)^-1 x_i^T

    `K` are the keys before RoPE; `Phi` is `d x sketch` with entries from N(0, 1/sketch), drawn per context, layer and
    head from the run's seed.

    Attributes:
        sketch: Dimensions that the keys are projected to; 0 disables the projection.
    """

    name: ClassVar[str] = "leverage"
    sketch: int = 48

    def __post_init__(self) -> None:
        check_count("sketch", self.sketch, 0, "dimensions")

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        return standardised(leverage(v, v.valid, self.sketch), v.valid)
