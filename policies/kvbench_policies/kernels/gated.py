"""Helpers shared by the retention-gate kernels: batch padding and exponentials of ages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.errors import UserError


def starts(valid: Tensor | None, batch_size: int, length: int, device: torch.device) -> Tensor:
    """Return the first valid column of every sequence, int32 `[B]`, from a left-padding mask.

    Args:
        valid: bool `[B, T]`, False on left padding; None means no padding.
        batch_size: Number of sequences, B.
        length: Number of columns, T.
        device: Device of the result.

    Raises:
        UserError: The mask has a wrong shape, or padding after a token (checked only on a CPU, to avoid a GPU
            synchronisation).
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
    """Compute `x.exp_()` on the torch paths for `x <= 0`, flushing negligible results to exactly 0.

    Weights of forgotten entries can be arbitrarily small. A CPU needs twenty times as long for an exponential with a
    subnormal result, or of minus infinity. Results below the square root of the smallest normal number (1e-19 in
    float32) are lost in any sum with a weight near 1; flushing them also keeps products of two weights normal.
    """
    minimum = math.log(torch.finfo(x.dtype).tiny) / 2
    x = x.clamp_(min=minimum).exp_()
    return torch.nn.functional.threshold_(x, 2 * math.exp(minimum), 0.0)
