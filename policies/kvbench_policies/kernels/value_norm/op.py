"""`value_norm`: how large a value is after the output projection, `V W_O` never held whole.

The norm of CriticalKV (Feng et al., arXiv 2502.03805) and DefensiveKV (arXiv 2510.13334). On a CPU,
blocks of tokens in torch; on CUDA the Triton kernel of `triton.py`. It ranks entries and has no
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.errors import UserError

from ..launch import by_triton

_BLOCK = 1 << 22
"""Elements of `V W_O` that the CPU holds at once for each sequence, in float32."""


def value_norm(value: Tensor, weight: Tensor, norm: str = "l1") -> Tensor:
    """Take the norm of every projected value, mean over the query heads of its KV head.

        out[b, h, i] = mean_{g in group} || value[b, h, i] @ weight[h * G + g] ||

    Float32 inside whatever comes in; products of bfloat16 and float16 are exact in it. Costs
    `2 H_q n d D` flops a sequence. Not differentiable: the result is cut off from the graph.

    Args:
        value: `[B, H, n, d]`.
        weight: The output projection by query head, `[H_q, d, D]`, `H_q` a multiple of `H`. No
            copy is made on CUDA of the view `o_proj.weight.view(D, H_q, d).permute(1, 2, 0)`.
        norm: `l1` or `l2`.

    Returns:
        float32 `[B, H, n]`.

    Raises:
        UserError: The shapes do not fit, or another norm.
    """
    _check(value, weight, norm)
    out: Tensor = projected_norm(value.detach(), weight.detach(), norm)
    return out


def _check(value: Tensor, weight: Tensor, norm: str) -> None:
    if norm not in ("l1", "l2"):
        raise UserError(f"norm={norm}: l1 or l2 would be right")
    fits = value.dim() == 4 and weight.dim() == 3 and value.shape[3] == weight.shape[1]
    if not fits or weight.shape[0] % value.shape[1]:
        raise UserError(
            f"value {list(value.shape)}, weight {list(weight.shape)}: [B, H, n, d] and [H_q, d, D] "
            "would be right, H_q a multiple of H"
        )


@torch.library.custom_op("kvbench::value_norm", mutates_args=())
def projected_norm(value: Tensor, weight: Tensor, norm: str) -> Tensor:
    """`value_norm`, its arguments checked."""
    if by_triton(value):
        from .triton import value_norm as kernel

        return kernel(value, weight, norm)
    return _blocked(value, weight, norm)


@projected_norm.register_fake
def _(value: Tensor, weight: Tensor, norm: str) -> Tensor:
    return value.new_empty(value.shape[:3], dtype=torch.float32)


def _blocked(value: Tensor, weight: Tensor, norm: str) -> Tensor:
    """`value_norm` in torch, a block of tokens at a time."""
    heads, n = value.shape[1:3]
    group = len(weight) // heads
    split = weight.float().unflatten(0, (heads, group))
    block = max(1, _BLOCK // (heads * weight.shape[-1]))
    total = torch.zeros(value.shape[:3], device=value.device)
    for start in range(0, n, block):
        part = value[:, :, start : start + block].float()
        for g in range(group):
            projected = part @ split[:, g]
            # On a CPU a sum of absolute values is several times as fast as a norm of order 1.
            size = projected.abs_().sum(-1) if norm == "l1" else projected.norm(dim=-1)
            total[:, :, start : start + block] += size
    return total / group
