"""What mergers share: entries of ragged heads side by side, and sums over them.

A head's entries lie anywhere among the columns that a view shows. A merger packs those that stay,
or those that go, into a rectangle and works on that.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Numbers that a merger holds at once beside its results: 16 MiB in float32."""


def pack(mask: Tensor, newest_first: bool = False) -> tuple[Tensor, Tensor]:
    """Put the chosen entries of every head side by side.

    Args:
        mask: Which entries, bool `[B, H, n]`.
        newest_first: In falling instead of rising order.

    Returns:
        Their indices, int64 `[B, H, m]`, and which of them there are, bool `[B, H, m]`; `m` is the
        largest count of a head. Where there is none the index is that of some other entry.
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
        target: The slot of every number, int64 `[B, H, m]`.
        slots: Slots of a head.

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
        index: Entries, int64 `[B, H, m]`.
        go: Which of them are summed, bool `[B, H, m]`.
        target: The slot of each, int64 `[B, H, m]`.
        slots: Slots of a head.
        weight: Factor of each, float32 `[B, H, m]`; None: 1.

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


def put(x: Tensor, index: Tensor, there: Tensor, rows: Tensor) -> Tensor:
    """Give a copy of `x` `[B, H, n, d]` with other rows at the slots of `index`.

    Args:
        x: Keys or values.
        index: Entry of every slot, int64 `[B, H, m]`.
        there: Which slots are written, bool `[B, H, m]`.
        rows: float32 `[B, H, m, d]`, cast to the type of `x`.
    """
    out = x.clone()
    b, h, c = there.nonzero(as_tuple=True)
    out[b, h, index[b, h, c]] = rows[b, h, c].to(x.dtype)
    return out


def window_sum(x: Tensor, width: int) -> Tensor:
    """Sum the last `width` of axis 2 up to every place, the place itself included.

    By doubling: no running sum, whose rounding errors would grow with the length.

    Args:
        x: `[B, H, m, ...]`.
        width: 1 or more.
    """
    total, reach = torch.zeros_like(x), 0
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
    """Shift axis 2 back by some places, zeros in front."""
    if by == 0:
        return x
    out = torch.zeros_like(x)
    out[:, :, by:] = x[:, :, :-by]
    return out
