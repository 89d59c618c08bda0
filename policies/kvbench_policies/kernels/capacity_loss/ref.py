"""Reference implementation of the capacity loss, with every pair of tokens in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def sums(log_beta: Tensor) -> Tensor:
    """Return the entries retained at every step, `S_t = sum_{i <= t} beta_i^(t - i)`, `[..., T]`.

    Args:
        log_beta: `log beta <= 0` of a sequence without padding, `[..., T]`; exact in float64.
    """
    steps = torch.arange(log_beta.shape[-1], device=log_beta.device)
    age_matrix = steps[:, None] - steps
    exponent = torch.where(age_matrix >= 0, age_matrix * log_beta[..., None, :], -torch.inf)
    return exponent.exp().sum(-1)


def capacity_loss(
    log_beta: Tensor,
    budget: int,
    *,
    scope: str = "head",
    reduce: str = "mean",
    valid: Tensor | None = None,
) -> Tensor:
    """Compute `op.capacity_loss` one unpadded sequence at a time."""
    sequences = log_beta.flatten(1, -2)
    losses = []
    for batch_index in range(len(sequences)):
        sequence = sequences[batch_index] if valid is None else sequences[batch_index][:, valid[batch_index]]
        head_count, length = sequence.shape
        if length <= budget:
            losses.append(sequence.sum() * 0)
            continue
        retained = sums(sequence)
        if scope == "global":
            excess = (retained.sum(0) - budget * head_count).relu().sum() / head_count
        else:
            excess = (retained - budget).relu().sum()
            excess = excess / head_count if reduce == "mean" else excess
        losses.append(excess / (length * (length - budget)))
    return torch.stack(losses).mean()
