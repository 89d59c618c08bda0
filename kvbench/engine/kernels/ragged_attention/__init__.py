"""Attention of a few new queries over ragged segments."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engine.kernels.launch import by_triton, interpreting

_WIDEST = 256
"""Largest head dimension supported by the kernel's tiles."""


def kernel_fits(key: Tensor, value: Tensor) -> bool:
    """Return whether the Triton kernel computes attention over these keys and values, `[..., d]` and `[..., d_v]`."""
    return by_triton(key) and key.shape[-1] == value.shape[-1] <= _WIDEST


def reads_in_place(key: Tensor) -> bool:
    """Return whether the kernel reads entries where they were prefilled; the interpreter reads bfloat16 in a copy."""
    return not (interpreting() and key.dtype == torch.bfloat16)
