"""`global_select`: the N best entries of a whole cache.

The allocator `global` (DBTrimKV; Layer-DefensiveKV, arXiv 2510.13334) needs one threshold over all layers and heads.
Every entry has a 63-bit integer rank key (`kvbench.parts.entry_key`). On a CPU, a partial sort finds the threshold; on
CUDA, a radix select in 6 passes over the keys, without a GPU synchronisation. Not differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engine.kernels.launch import by_triton
from kvbench.errors import UserError
from kvbench.parts import best, entry_key


def global_select(
    score: Tensor, position: Tensor, valid: Tensor, count: Tensor, protect: Tensor | None = None
) -> Tensor:
    """Select the `count` best entries of every sequence over all layers and heads.

    Entries are ranked by score; ties go to the more recent entry, then to the lower head. The order is the same on
    every device.

    Args:
        score: `[B, K, n]`, K = layers x heads, read as float32; finite where valid.
        position: Distinct within a head, below 2^28, int64 `[B, K, n]`.
        valid: Entries that exist, bool `[B, K, n]`.
        count: int64 `[B]`, at most the number of valid entries.
        protect: Classes of `kvbench.plugin.Scores`, int8 `[B, K, n]`; None protects nothing.

    Returns:
        bool `[B, K, n]`.

    Raises:
        UserError: The shapes differ.
    """
    arguments = {"score": score, "position": position, "valid": valid}
    for argument_name, tensor in arguments.items() if protect is None else (arguments | {"protect": protect}).items():
        if tensor.dim() != 3 or tensor.shape != score.shape:
            raise UserError(
                f"{argument_name} is {list(tensor.shape)}, score {list(score.shape)}; use [B, K, n] for all"
            )
    if protect is None:
        protect = torch.zeros_like(valid, dtype=torch.int8)
    return select_largest(entry_key(score.detach(), protect, position, valid), count)


def select_largest(key: Tensor, count: Tensor) -> Tensor:
    """Select the `count` largest keys of every sequence; ties go to the first.

    Negative keys are never selected. Equivalent to `kvbench.parts.best` on the flattened rows.

    Args:
        key: int64 `[B, K, n]`.
        count: int64 `[B]`, at most the number of non-negative keys.

    Returns:
        bool `[B, K, n]`.

    Raises:
        UserError: The shape or type is wrong.
    """
    if key.dim() != 3 or key.dtype != torch.int64 or count.shape != key.shape[:1]:
        raise UserError(
            f"key is {key.dtype} {list(key.shape)} and count {list(count.shape)} instead of int64 [B, K, n] and [B]"
        )
    keep_mask: Tensor = largest(key, count)
    return keep_mask


@torch.library.custom_op("kvbench::select_largest", mutates_args=())
def largest(key: Tensor, count: Tensor) -> Tensor:
    """Run `select_largest` on validated arguments."""
    if by_triton(key):
        from .triton import largest as kernel

        return kernel(key, count)
    return best(key.flatten(1), count).view(key.shape)


@largest.register_fake
def _(key: Tensor, count: Tensor) -> Tensor:
    return key.new_empty(key.shape, dtype=torch.bool)
