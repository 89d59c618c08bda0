"""`value_norm`: norm of values after the output projection, without materialising `V W_O`.

The norm of CriticalKV (Feng et al., arXiv 2502.03805) and DefensiveKV (arXiv 2510.13334). It runs in torch on a CPU,
a block of heads or tokens at a time, and in the Triton kernel of `triton.py` on CUDA. Not differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engine.kernels.launch import by_triton
from kvbench.errors import UserError

_BLOCK, _DEVICE_BLOCK = 1 << 19, 1 << 22
"""Maximum elements of `V W_O` in memory per sequence, in float32, on a CPU (about its cache) and elsewhere."""


def value_norm(value: Tensor, weight: Tensor, norm: str = "l1") -> Tensor:
    """Return the norm of every projected value, averaged over the query heads of its KV head.

        out[b, h, i] = mean_{g in group} || value[b, h, i] @ weight[h * G + g] ||

    Computed in float32, in which products of bfloat16 and float16 are exact. Costs `2 H_q n d D` flops per sequence.
    The result is detached.

    Args:
        value: `[B, H, n, d]`.
        weight: Output projection per query head, `[H_q, d, D]`, `H_q` a multiple of `H`. On CUDA the view
            `o_proj.weight.view(D, H_q, d).permute(1, 2, 0)` is used without a copy.
        norm: `l1` or `l2`.

    Returns:
        float32 `[B, H, n]`.

    Raises:
        UserError: The shapes do not fit, or the norm is unknown.
    """
    _check(value, weight, norm)
    norms: Tensor = projected_norm(value.detach(), weight.detach(), norm)
    return norms


def _check(value: Tensor, weight: Tensor, norm: str) -> None:
    if norm not in ("l1", "l2"):
        raise UserError(f"unknown norm={norm}; use l1 or l2")
    shapes_fit = value.dim() == 4 and weight.dim() == 3 and value.shape[3] == weight.shape[1]
    if not shapes_fit or weight.shape[0] % value.shape[1]:
        raise UserError(
            f"value is {list(value.shape)} and weight {list(weight.shape)} instead of "
            "[B, H, n, d] and [H_q, d, D] with H_q a multiple of H"
        )


@torch.library.custom_op("kvbench::value_norm", mutates_args=())
def projected_norm(value: Tensor, weight: Tensor, norm: str) -> Tensor:
    """Run `value_norm` on validated arguments."""
    if by_triton(value):
        from .triton import value_norm as kernel

        return kernel(value, weight, norm)
    return _blocked(value, weight, norm)


@projected_norm.register_fake
def _(value: Tensor, weight: Tensor, norm: str) -> Tensor:
    return value.new_empty(value.shape[:3], dtype=torch.float32)


def _blocked(values: Tensor, weight: Tensor, norm: str) -> Tensor:
    """Compute `value_norm` in torch, a block of heads, or of the tokens of one head, at a time."""
    head_count, entry_count = values.shape[1:3]
    group_size, width = len(weight) // head_count, weight.shape[-1]
    head_weights = weight.float().unflatten(0, (head_count, group_size))
    # Few heads of many tokens rather than many heads of few: products with few rows are half as fast.
    block = _BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK
    heads_at_once, entries_at_once = max(1, block // (width * max(1, entry_count))), max(1, block // width)
    norm_sums = torch.zeros(values.shape[:3], dtype=torch.float32, device=values.device)
    # New memory for every product would cost up to three quarters of the time of the product itself.
    block_entries = min(heads_at_once, head_count) * min(entries_at_once, entry_count)
    memory = norm_sums.new_empty(len(values) * block_entries * width)
    for first_head in range(0, head_count, heads_at_once):
        heads = slice(first_head, first_head + heads_at_once)
        for first_entry in range(0, entry_count, entries_at_once):
            entries = slice(first_entry, first_entry + entries_at_once)
            value_block = values[:, heads, entries].float()
            for group_index in range(group_size):
                projected = memory[: value_block[..., 0].numel() * width].view(*value_block.shape[:3], width)
                torch.matmul(value_block, head_weights[heads, group_index], out=projected)
                # On a CPU, a sum of absolute values is several times as fast as a norm of order 1.
                norm_sums[:, heads, entries] += projected.abs_().sum(-1) if norm == "l1" else projected.norm(dim=-1)
    return norm_sums / group_size
