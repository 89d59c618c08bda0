"""Random projections that depend neither on the batch nor on the order of cells."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.plugin import View
from kvbench.view import hashed


def gaussian(v: View, rows: int, columns: int, stream: int = 0) -> Tensor:
    """Standard normal noise, float32 `[B, H, rows, columns]`; streams are independent.

    Like `View.noise`, it is not the output of a generator but a hash: of (seed, context, layer,
    head, row, column).
    """
    where = v.col.device
    head = torch.arange(v.model.kv_heads, device=where)
    start = v.seed[:, None] + 0x9E3779B1 * (v.layer * 1024 + head)
    cell = torch.arange(rows * columns, device=where).view(rows, columns)

    def uniform(part: int) -> Tensor:
        # Hashed twice: otherwise neighbouring seeds would draw the same numbers, one cell apart.
        own = hashed(start - 0x51ED2705 * (1 + 2 * stream + part))
        return (hashed(own[..., None, None] + cell) >> 8).to(torch.float32) / float(1 << 24)

    radius = (-2 * (1 - uniform(0)).log()).sqrt()  # Box and Muller
    return radius * (2 * math.pi * uniform(1)).cos()
