"""What the kernels of retention gates share: the padding of a batch, and exponentials of ages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.errors import UserError


def starts(valid: Tensor | None, batch_size: int, length: int, device: torch.device) -> Tensor:
    """The first valid column of every sequence, int32 `[B]`, from a left-padding mask.

    Args:
        valid: bool `[B, T]`, False on the padding left of each sequence, or None for no padding.
        batch_size: Number of sequences, B.
        length: Number of columns, T.
        device: Device of the result.

    Raises:
        UserError: The mask has another shape, or padding after a token (checked on a CPU only, so
            that nothing waits for a GPU).
    """
    if valid is None:
        return torch.zeros(batch_size, dtype=torch.int32, device=device)
    if valid.shape != (batch_size, length) or valid.dtype != torch.bool:
        raise UserError(f"valid is {valid.dtype} {list(valid.shape)} instead of bool [{batch_size}, {length}]")
    is_checked = valid.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_checked and bool((valid[:, 1:] < valid[:, :-1]).any()):
        raise UserError("valid has padding after a token; pad on the left only")
    return (length - valid.sum(1)).to(device=device, dtype=torch.int32)


def exp_(x: Tensor) -> Tensor:
    """`x.exp_()` on the torch paths, where `x` is 0 or less: negligible results are exactly 0.

    An entry that a gate forgets has a weight of any smallness. Below the smallest normal number,
    and at minus infinity, a CPU takes twenty times as long for an exponential. What is below the
    square root of that number (1e-19 in float32) is lost in every sum with a weight near 1, and
    without it no product of two weights gets that small.
    """
    minimum = math.log(torch.finfo(x.dtype).tiny) / 2
    x = x.clamp_(min=minimum).exp_()
    return torch.nn.functional.threshold_(x, 2 * math.exp(minimum), 0.0)
