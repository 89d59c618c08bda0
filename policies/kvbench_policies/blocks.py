"""What scores that look at blocks of consecutive entries have in common.

The entries of a head lie anywhere among the columns that a view shows. They are packed side by side
and cut into blocks of equal size, so that a block holds the same entries whatever the padding is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def order_of(mask: Tensor) -> Tensor:
    """Columns of the chosen entries (bool `[B, H, n]`) in their order, then the other columns."""
    return (~mask).to(torch.int8).argsort(dim=-1, stable=True)


def in_blocks(x: Tensor, mask: Tensor, order: Tensor, size: int) -> Tensor:
    """Pack chosen entries side by side and cut them into blocks; zeros fill the last blocks.

    Args:
        x: One value or vector per entry, `[B, H, n]` or `[B, H, n, d]`.
        mask: Which entries are chosen, bool `[B, H, n]`.
        order: `order_of(mask)`.
        size: Entries of a block.

    Returns:
        float32 `[B, H, ceil(n / size), size]` or `[B, H, ceil(n / size), size, d]`.
    """
    chosen, index = mask.gather(2, order), order
    if x.dim() == 4:
        chosen, index = chosen[..., None], order[..., None].expand(-1, -1, -1, x.shape[-1])
    packed = x.gather(2, index).float().masked_fill(~chosen, 0.0)
    fill = [0] * (2 * (packed.dim() - 3)) + [0, -packed.shape[2] % size]
    return pad(packed, fill).unflatten(2, (-1, size))


def from_blocks(blocks: Tensor, order: Tensor) -> Tensor:
    """Put values `[B, H, ceil(n / size), size]` back to their columns, `[B, H, n]`."""
    flat = blocks.flatten(2, 3)[..., : order.shape[-1]]
    return torch.zeros_like(flat).scatter_(-1, order, flat)
