"""Random projections, independent of the batch and of the order of cells."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.plugin import View
from kvbench.view import hashed


def gaussian(view: View, rows: int, columns: int, stream: int = 0) -> Tensor:
    """Return standard normal noise, float32 `[B, H, rows, columns]`; streams are independent.

    Like `View.noise`, it is a hash, not a generator's output: of (seed, context, layer, head, row, column).
    """
    device = view.col.device
    head_indices = torch.arange(view.model.kv_heads, device=device)
    head_seeds = view.seed[:, None] + 0x9E3779B1 * (view.layer * 1024 + head_indices)
    cell_indices = torch.arange(rows * columns, device=device).view(rows, columns)

    def uniform(component: int) -> Tensor:
        # Hashed twice: otherwise adjacent seeds would give the same numbers, shifted by one cell.
        component_seeds = hashed(head_seeds - 0x51ED2705 * (1 + 2 * stream + component))
        return (hashed(component_seeds[..., None, None] + cell_indices) >> 8).to(torch.float32) / float(1 << 24)

    radius = (-2 * (1 - uniform(0)).log()).sqrt()  # Box-Muller
    return radius * (2 * math.pi * uniform(1)).cos()
