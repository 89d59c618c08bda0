"""Oracle of the capacity loss: the equation, with every pair of tokens in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def sums(log_beta: Tensor) -> Tensor:
    """Entries retained at every step, `S_t = sum_{i <= t} beta_i^(t - i)`, `[..., T]`.

    Args:
        log_beta: `log beta <= 0` of a sequence without padding, `[..., T]`; exact in float64.
    """
    t = torch.arange(log_beta.shape[-1], device=log_beta.device)
    age = t[:, None] - t
    exponent = torch.where(age >= 0, age * log_beta[..., None, :], -torch.inf)
    return exponent.exp().sum(-1)


def capacity_loss(
    log_beta: Tensor,
    budget: int,
    *,
    scope: str = "head",
    reduce: str = "mean",
    valid: Tensor | None = None,
) -> Tensor:
    """The loss of `op.capacity_loss`, sequence by sequence with the padding cut off."""
    rows = log_beta.flatten(1, -2)
    losses = []
    for b in range(len(rows)):
        row = rows[b] if valid is None else rows[b][:, valid[b]]
        heads, length = row.shape
        if length <= budget:
            losses.append(row.sum() * 0)
            continue
        kept = sums(row)
        if scope == "global":
            excess = (kept.sum(0) - budget * heads).relu().sum() / heads
        else:
            excess = (kept - budget).relu().sum()
            excess = excess / heads if reduce == "mean" else excess
        losses.append(excess / (length * (length - budget)))
    return torch.stack(losses).mean()
