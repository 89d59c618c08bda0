"""Oracle of retention-gated attention: the equation, with every logit in memory."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """The attention of `op.retention_attention`, 0 for padded queries; best in float64."""
    group = q.shape[1] // k.shape[1]
    k, v, log_beta = (x.repeat_interleave(group, 1) for x in (k, v, log_beta))
    t = torch.arange(q.shape[2], device=q.device)
    age = t[:, None] - t
    seen = (age >= 0).expand(len(q), 1, -1, -1)
    if valid is not None:
        seen = seen & valid[:, None, None] & valid[:, None, :, None]
    logit = scale * q @ k.mT
    faded = age.clamp_min(0) * log_beta[:, :, None]
    logit = logit + faded if gating == "additive" else logit * faded.exp()
    logit = logit.masked_fill(~seen, -torch.inf)
    weight = logit.softmax(-1).masked_fill(~seen, 0.0)  # a padded query's row is all NaN
    return weight @ v
