"""Reference implementation of `value_norm`."""

from __future__ import annotations

import torch
from torch import Tensor


def value_norm(value: Tensor, weight: Tensor, norm: str = "l1") -> Tensor:
    """Return the norm of every projected value, averaged over the group, with all of `V W_O` in memory.

        out[b, h, i] = mean_{g in group} || value[b, h, i] @ weight[h * G + g] ||

    Args:
        value: `[B, H, n, d]`.
        weight: `[H * G, d, D]`, of the same dtype.
        norm: `l1` or `l2`.

    Returns:
        `[B, H, n]`, in the dtype of the input (float64 for checks).
    """
    head_weights = weight.unflatten(0, (value.shape[1], -1))
    projected = torch.einsum("bhnd,hgdc->bhgnc", value, head_weights)
    norm_order = 1 if norm == "l1" else 2
    norms: Tensor = torch.linalg.vector_norm(projected, ord=norm_order, dim=-1)
    return norms.mean(2)
