"""Helpers for scores that work on blocks of consecutive entries.

The entries of a head may be at any columns of a view. They are packed side by side and split into blocks of equal size,
so a block holds the same entries regardless of padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def order_of(entry_mask: Tensor) -> Tensor:
    """Return the columns of the selected entries (bool `[B, H, n]`) in order, then all other columns."""
    return (~entry_mask).to(torch.int8).argsort(dim=-1, stable=True)


def in_blocks(entries: Tensor, entry_mask: Tensor, column_order: Tensor, size: int) -> Tensor:
    """Pack the selected entries side by side and split them into blocks, zero-padding the last ones.

    Args:
        entries: One value or vector per entry, `[B, H, n]` or `[B, H, n, d]`.
        entry_mask: Selected entries, bool `[B, H, n]`.
        column_order: `order_of(entry_mask)`.
        size: Entries of a block.

    Returns:
        float32 `[B, H, ceil(n / size), size]` or `[B, H, ceil(n / size), size, d]`.
    """
    ordered_mask, indices = entry_mask.gather(2, column_order), column_order
    if entries.dim() == 4:
        ordered_mask, indices = (
            ordered_mask[..., None],
            column_order[..., None].expand(-1, -1, -1, entries.shape[-1]),
        )
    packed = entries.gather(2, indices).float().masked_fill(~ordered_mask, 0.0)
    padding = [0] * (2 * (packed.dim() - 3)) + [0, -packed.shape[2] % size]
    return pad(packed, padding).unflatten(2, (-1, size))


def from_blocks(blocks: Tensor, column_order: Tensor) -> Tensor:
    """Scatter values `[B, H, ceil(n / size), size]` back to their columns, `[B, H, n]`."""
    flattened = blocks.flatten(2, 3)[..., : column_order.shape[-1]]
    return torch.zeros_like(flattened).scatter_(-1, column_order, flattened)
