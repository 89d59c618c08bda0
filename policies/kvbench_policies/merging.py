"""Helpers for mergers: packing the entries of ragged heads, and sums over entries.

The kept entries of a head may be at any columns of a view. A merger packs the kept or the evicted entries into a
rectangular tensor and works on that.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Maximum number of temporary values in memory: 16 MiB in float32."""


def pack(entry_mask: Tensor, newest_first: bool = False) -> tuple[Tensor, Tensor]:
    """Pack the selected entries of every head side by side.

    Args:
        entry_mask: Selected entries, bool `[B, H, n]`.
        newest_first: Pack in descending instead of ascending order.

    Returns:
        Indices of the selected entries, int64 `[B, H, m]`, and the slots in use, bool `[B, H, m]`; `m` is the largest
        count of a head. Unused slots hold the index of an unselected entry.
    """
    entry_count = entry_mask.shape[-1]
    ordered_mask = entry_mask.flip(-1) if newest_first else entry_mask
    packed_order = ordered_mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    entry_counts = entry_mask.sum(-1, keepdim=True)
    slot_count = int(entry_counts.max()) if entry_counts.numel() else 0
    indices = packed_order[..., :slot_count]
    if newest_first:
        indices = entry_count - 1 - indices
    return indices, torch.arange(slot_count, device=entry_mask.device) < entry_counts


def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """Gather `tensor` (`[B, H, n, d]`) at `indices` (int64 `[B, H, m]`), float32 `[B, H, m, d]`."""
    return tensor.gather(2, indices[..., None].expand(-1, -1, -1, tensor.shape[-1])).float()


def add_rows(totals: Tensor, targets: Tensor, rows: Tensor) -> None:
    """Add `rows` `[m, d]` to the rows `targets` (int64 `[m]`) of `totals`, in a fixed order."""
    if totals.is_cuda:  # index_add_ is not deterministic on CUDA; this sorts first
        totals.index_put_((targets,), rows, accumulate=True)
    else:
        totals.index_add_(0, targets, rows)


def sum_into(values: Tensor, targets: Tensor, slot_count: int) -> Tensor:
    """Sum values into slots per head.

    Args:
        values: float32 `[B, H, m]`.
        targets: Slot of every value, int64 `[B, H, m]`.
        slot_count: Slots per head.

    Returns:
        float32 `[B, H, slot_count]`.
    """
    batch_size, head_count, _ = values.shape
    totals = torch.zeros(batch_size * head_count * slot_count, device=values.device)
    head_indices = torch.arange(batch_size * head_count, device=values.device).view(batch_size, head_count, 1)
    add_rows(totals, (head_indices * slot_count + targets).reshape(-1), values.reshape(-1))
    return totals.view(batch_size, head_count, slot_count)


def sum_rows_into(
    tensor: Tensor,
    indices: Tensor,
    merge_mask: Tensor,
    targets: Tensor,
    slot_count: int,
    weights: Tensor | None = None,
) -> Tensor:
    """Sum rows of entries into slots per head, one block at a time.

    Args:
        tensor: Keys or values, `[B, H, n, d]`.
        indices: Indices of entries, int64 `[B, H, m]`.
        merge_mask: Entries to sum, bool `[B, H, m]`.
        targets: Slot of each, int64 `[B, H, m]`.
        slot_count: Slots per head.
        weights: Factor of each, float32 `[B, H, m]`; None means 1.

    Returns:
        float32 `[B, H, slot_count, d]`.
    """
    batch_size, head_count, _, head_dim = tensor.shape
    totals = torch.zeros(batch_size * head_count * slot_count, head_dim, device=tensor.device)
    batch_indices, head_indices, entry_indices = merge_mask.nonzero(as_tuple=True)
    block_size = max(1, BLOCK // head_dim)
    for block_start in range(0, len(batch_indices), block_size):
        block_indices = (
            batch_indices[block_start : block_start + block_size],
            head_indices[block_start : block_start + block_size],
            entry_indices[block_start : block_start + block_size],
        )
        block_rows = tensor[block_indices[0], block_indices[1], indices[block_indices]].float()
        if weights is not None:
            block_rows = block_rows * weights[block_indices][:, None]
        add_rows(
            totals,
            (block_indices[0] * head_count + block_indices[1]) * slot_count + targets[block_indices],
            block_rows,
        )
    return totals.view(batch_size, head_count, slot_count, head_dim)


def put(tensor: Tensor, indices: Tensor, in_use: Tensor, new_rows: Tensor) -> Tensor:
    """Return a copy of `tensor` `[B, H, n, d]` with new rows at the slots of `indices`.

    Args:
        tensor: Keys or values.
        indices: Entry of every slot, int64 `[B, H, m]`.
        in_use: Slots to write, bool `[B, H, m]`.
        new_rows: New rows, float32 `[B, H, m, d]`, cast to the type of `tensor`.
    """
    updated = tensor.clone()
    batch_indices, head_indices, slot_indices = in_use.nonzero(as_tuple=True)
    updated[batch_indices, head_indices, indices[batch_indices, head_indices, slot_indices]] = new_rows[
        batch_indices, head_indices, slot_indices
    ].to(tensor.dtype)
    return updated


def sum_before(values: Tensor, width: int) -> Tensor:
    """Sum the `width` elements of axis 2 before every element, excluding itself.

    Uses doubling instead of a running sum, whose rounding errors would grow with the length. Each sum depends bitwise
    only on the elements it adds.

    Args:
        values: `[B, H, m, ...]`.
        width: 1 or more.
    """
    totals, total_reach = torch.zeros_like(values), 1
    partial_sums, span_length = values, 1
    while width:
        if width & 1:
            totals = totals + _shift_back(partial_sums, total_reach)
            total_reach += span_length
        width >>= 1
        if width:
            partial_sums = partial_sums + _shift_back(partial_sums, span_length)
            span_length *= 2
    return totals


def _shift_back(values: Tensor, shift: int) -> Tensor:
    """Shift axis 2 back by `shift`, filling with zeros."""
    if shift == 0:
        return values
    shifted = torch.zeros_like(values)
    shifted[:, :, shift:] = values[:, :, :-shift]
    return shifted
