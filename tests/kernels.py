"""What the tests of the kernels share."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process runs the Triton kernels in the interpreter (test_interpreter.py)."""
DEVICES = ["cuda"] if torch.cuda.is_available() and not INTERPRETED else []
DEVICES += ["cpu"]
torch_path = pytest.mark.skipif(INTERPRETED, reason="about the torch path, not the kernels")


if INTERPRETED:  # a third of its time goes into what it does for nothing
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # Without `debug` it computes whether integers overflow and does not assert it.
    builder.options = replace(builder.options, sanitize_overflow=False)
    # It lists the members of the same modules before every launch.
    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": functools.cache(inspect.getmembers)})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of this dtype where none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def padding(batch: int, length: int) -> Tensor | None:
    """bool `[B, T]`: none for a single sequence, and on the left 0, 7 and all but 20 otherwise."""
    if batch == 1:
        return None
    left = torch.tensor([0, 7, length - 20])[:batch]
    return torch.arange(length) >= left[:, None]


def rates(*shape: int, fastest: float = 1.5, slowest: float = -18.0) -> Tensor:
    """`log beta` of all speeds, from forgotten in a step to never (log-uniform), float32."""
    return -torch.empty(*shape).uniform_(slowest, fastest).exp()


def difference(got: Tensor, true: Tensor) -> float:
    """Largest difference, relative to each element down to a thousandth of the largest."""
    got, true = got.double().cpu(), true.double().cpu()
    assert got.shape == true.shape
    assert got.isfinite().all()
    return float(((got - true).abs() / (true.abs() + 1e-3 * true.abs().max() + 1e-30)).max())


def scaled(got: Tensor, true: Tensor) -> float:
    """Largest difference, relative to the largest element."""
    got, true = got.double().cpu(), true.double().cpu()
    assert got.shape == true.shape
    assert got.isfinite().all()
    return float((got - true).abs().max() / true.abs().max())


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` and its like return with NaN (integers with their largest)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
