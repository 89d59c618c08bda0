"""Reference implementation of retention-gated attention, with every logit in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.view.softmax import cap_of, sinks_of


def retention_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_beta: Tensor,
    *,
    scale: float,
    gating: str = "additive",
    valid: Tensor | None = None,
) -> Tensor:
    """Compute `op.retention_attention`, 0 for padded queries; use float64 for checks."""
    group_size = q.shape[1] // k.shape[1]
    k, v, log_beta = (tensor.repeat_interleave(group_size, 1) for tensor in (k, v, log_beta))
    steps = torch.arange(q.shape[2], device=q.device)
    age_matrix = steps[:, None] - steps
    visible_mask = (age_matrix >= 0).expand(len(q), 1, -1, -1)
    if valid is not None:
        visible_mask = visible_mask & valid[:, None, None] & valid[:, None, :, None]
    logits = float(scale) * q @ k.mT
    cap, sinks = cap_of(scale), sinks_of(scale)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_fades = age_matrix.clamp_min(0) * log_beta[:, :, None]
    logits = logits + log_fades if gating == "additive" else logits * log_fades.exp()
    logits = logits.masked_fill(~visible_mask, -torch.inf)
    if sinks is not None:  # one more entry, which has no value
        logits = torch.cat([logits, sinks.to(logits).view(-1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    # Without sinks, the row of a padded query is all NaN.
    attention = logits.softmax(-1)[..., : q.shape[2]].masked_fill(~visible_mask, 0.0)
    return attention @ v
