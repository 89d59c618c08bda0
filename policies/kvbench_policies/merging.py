"""What mergers share: packing entries of ragged heads side by side, and sums over entries.

The entries that a head keeps lie anywhere among the columns that a view shows. A merger packs the
kept entries, or the evicted ones, into a rectangle and works on that.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Number of values that a merger holds at once beside its results: 16 MiB in float32."""


def pack(mask: Tensor, newest_first: bool = False) -> tuple[Tensor, Tensor]:
    """Pack the chosen entries of every head side by side.

    Args:
        mask: Which entries are chosen, bool `[B, H, n]`.
        newest_first: Pack in falling instead of rising order.

    Returns:
        Indices of the chosen entries, int64 `[B, H, m]`, and which of these slots are in use, bool
        `[B, H, m]`; `m` is the largest count of a head. The index in an unused slot is that of
        another entry.
    """
    n = mask.shape[-1]
    chosen = mask.flip(-1) if newest_first else mask
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    count = mask.sum(-1, keepdim=True)
    m = int(count.max()) if count.numel() else 0
    index = order[..., :m]
    if newest_first:
        index = n - 1 - index
    return index, torch.arange(m, device=mask.device) < count


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x` (`[B, H, n, d]`) at `index` (int64 `[B, H, m]`) in float32, `[B, H, m, d]`."""
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1])).float()


def add_rows(total: Tensor, target: Tensor, rows: Tensor) -> None:
    """Add `rows` `[m, d]` to the rows `target` (int64 `[m]`) of `total`, in a fixed order."""
    if total.is_cuda:  # index_add_ adds in whatever order its threads come; this sorts first
        total.index_put_((target,), rows, accumulate=True)
    else:
        total.index_add_(0, target, rows)


def sum_into(x: Tensor, target: Tensor, slots: int) -> Tensor:
    """Sum numbers into slots of their heads.

    Args:
        x: float32 `[B, H, m]`.
        target: Slot of every number, int64 `[B, H, m]`.
        slots: Number of slots of a head.

    Returns:
        float32 `[B, H, slots]`.
    """
    batch, heads, _ = x.shape
    total = torch.zeros(batch * heads * slots, device=x.device)
    head = torch.arange(batch * heads, device=x.device).view(batch, heads, 1)
    add_rows(total, (head * slots + target).reshape(-1), x.reshape(-1))
    return total.view(batch, heads, slots)


def sum_rows_into(
    x: Tensor, index: Tensor, go: Tensor, target: Tensor, slots: int, weight: Tensor | None = None
) -> Tensor:
    """Sum rows of entries into slots of their heads, block by block.

    Args:
        x: Keys or values, `[B, H, n, d]`.
        index: Indices of entries, int64 `[B, H, m]`.
        go: Which of these entries are summed, bool `[B, H, m]`.
        target: Slot of each, int64 `[B, H, m]`.
        slots: Number of slots of a head.
        weight: Factor of each, float32 `[B, H, m]`; None means 1.

    Returns:
        float32 `[B, H, slots, d]`.
    """
    batch, heads, _, dim = x.shape
    total = torch.zeros(batch * heads * slots, dim, device=x.device)
    b, h, e = go.nonzero(as_tuple=True)
    step = max(1, BLOCK // dim)
    for start in range(0, len(b), step):
        part = (b[start : start + step], h[start : start + step], e[start : start + step])
        rows = x[part[0], part[1], index[part]].float()
        if weight is not None:
            rows = rows * weight[part][:, None]
        add_rows(total, (part[0] * heads + part[1]) * slots + target[part], rows)
    return total.view(batch, heads, slots, dim)


def put(x: Tensor, index: Tensor, in_use: Tensor, rows: Tensor) -> Tensor:
    """Give a copy of `x` `[B, H, n, d]` with other rows at the slots of `index`.

    Args:
        x: Keys or values.
        index: Entry of every slot, int64 `[B, H, m]`.
        in_use: Which slots are written, bool `[B, H, m]`.
        rows: New rows, float32 `[B, H, m, d]`, cast to the type of `x`.
    """
    out = x.clone()
    b, h, c = in_use.nonzero(as_tuple=True)
    out[b, h, index[b, h, c]] = rows[b, h, c].to(x.dtype)
    return out


def sum_before(x: Tensor, width: int) -> Tensor:
    """Sum the `width` places of axis 2 before every place, itself excluded.

    By doubling instead of by a running sum, whose rounding errors would grow with the length. The
    sum at a place depends on nothing but the places it adds up, to the last bit.

    Args:
        x: `[B, H, m, ...]`.
        width: 1 or more.
    """
    total, reach = torch.zeros_like(x), 1
    power, size = x, 1
    while width:
        if width & 1:
            total = total + _later(power, reach)
            reach += size
        width >>= 1
        if width:
            power = power + _later(power, size)
            size *= 2
    return total


def _later(x: Tensor, by: int) -> Tensor:
    """Shift axis 2 back by some places, with zeros in front."""
    if by == 0:
        return x
    out = torch.zeros_like(x)
    out[:, :, by:] = x[:, :, :-by]
    return out
