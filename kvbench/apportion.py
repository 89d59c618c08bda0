"""Exact integer shares: proportional to weights, within bounds, summing to the total."""

from __future__ import annotations

import torch
from torch import Tensor


def fill(weight: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Spread totals in proportion to weights, each share within its bounds, not yet rounded.

    What a bound cuts off or adds goes to the shares that are within their bounds, in proportion to
    their weights (evenly where these are all 0).

    Args:
        weight: float64 `[B, K]`, 0 or more.
        total: int64 `[B]`, between the sums of `least` and `most`.
        most: Upper bounds, int64 `[B, K]`.
        least: Lower bounds, int64 `[B, K]` or one number, at most `most`.

    Returns:
        float64 `[B, K]` summing to `total` (up to rounding).
    """
    high = most.double()
    low = torch.as_tensor(least, device=weight.device).double().expand_as(high)
    low = torch.minimum(low, high)
    fixed = torch.zeros_like(high, dtype=torch.bool)
    share = low.clone()
    # Water filling: a round pins at least one share to a bound, or is the last.
    for _ in range(weight.shape[-1] + 1):
        left = total.double() - torch.where(fixed, share, 0.0).sum(-1)
        free = torch.where(fixed, 0.0, weight.double())
        nothing = free.sum(-1, keepdim=True) <= 0
        free = torch.where(nothing, (~fixed).double(), free)
        part = left[:, None] * free / free.sum(-1, keepdim=True).clamp(min=1e-300)
        clipped = torch.minimum(torch.maximum(part, low), high)
        share = torch.where(fixed, share, clipped)
        off = torch.where(fixed, 0.0, clipped - part)
        surplus = off.sum(-1, keepdim=True)
        surplus = surplus.masked_fill(surplus.abs() < 1e-9 * total.double()[:, None], 0.0)
        # As usual in water filling: pin those at the bound whose violations weigh more.
        below, above = ~fixed & (part < low), ~fixed & (part > high)
        pinned = torch.where(surplus > 0, below, torch.where(surplus < 0, above, below | above))
        if not bool(pinned.any()):
            break
        fixed = fixed | pinned
    return share


def largest_remainder(real: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Round shares to integers that sum to the totals and stay within their bounds.

    Args:
        real: float64 `[B, K]`, summing to about `total`, within the bounds.
        total: int64 `[B]`.
        most, least: As in `fill`.

    Returns:
        int64 `[B, K]`; the largest fractions are rounded up, of equal ones the first.
    """
    low = torch.as_tensor(least, device=real.device).long().expand_as(most)
    low = torch.minimum(low, most)
    # A share that is whole but for the last bits of a float stays whole.
    near = real.round()
    real = torch.where((real - near).abs() < 1e-9 * near.abs().clamp(min=1.0), near, real)
    share = torch.minimum(torch.maximum(real.floor().long(), low), most)
    # Fractions that differ by the last bits of a float alone are equal.
    fraction = ((real - share) * 2**30).round()
    order = fraction.argsort(dim=-1, descending=True, stable=True)
    for sign in (1, -1):
        room = ((most - share) if sign > 0 else (share - low)).gather(-1, order)
        if sign < 0:
            order, room = order.flip(-1), room.flip(-1)
        left = (sign * (total - share.sum(-1)))[:, None].clamp(min=0)
        # First one each in the order of the fractions, then whatever room is left.
        one = ((room > 0) & ((room > 0).cumsum(-1) <= left)).long()
        rest = left - one.sum(-1, keepdim=True)
        spare = room - one
        more = torch.minimum(spare, (rest - (spare.cumsum(-1) - spare)).clamp(min=0))
        share = share.scatter_add(-1, order, sign * (one + more))
    return share


def apportion(weight: Tensor, total: Tensor, most: Tensor, least: Tensor | int = 0) -> Tensor:
    """Spread totals over integer shares in proportion to weights, within bounds.

    Args:
        weight: float64 `[B, K]`, 0 or more.
        total: int64 `[B]`, between the sums of `least` and `most`.
        most: Upper bounds, int64 `[B, K]`.
        least: Lower bounds, int64 `[B, K]` or one number.

    Returns:
        int64 `[B, K]` summing to `total`: what a bound cuts off goes to the others in proportion to
        their weights (evenly where these are all 0); rounded by largest remainder, ties to the
        lower index.
    """
    return largest_remainder(fill(weight, total, most, least), total, most, least)
