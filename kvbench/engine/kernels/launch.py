"""Shared by all kernels: when Triton runs them, and how they are compiled without a GPU.

Triton is optional (`pip install 'kvbench[gpu]'`). It is imported when a tensor is on a GPU that it compiles for, or
`TRITON_INTERPRET=1` requests its interpreter; everything else runs on blocked torch code, and so does everything with
`KVBENCH_TRITON=0`. Triton reads `TRITON_INTERPRET` when a kernel is decorated, so set it before kernels are imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.files import is_off

P = ParamSpec("P")
R = TypeVar("R")

SWITCH = "KVBENCH_TRITON"
"""Environment variable; 0 turns the Triton kernels off."""

_TOO_LARGE = "OutOfResources"
"""Class of Triton's error for a kernel that needs more shared memory or threads than a GPU has, if Triton is there."""

_MIN_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs for which Triton compiles (Ampere)."""


@cache
def interpreting() -> bool:
    """Return whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _uses_triton() -> bool:
    return not is_off(SWITCH) and find_spec("triton") is not None


@cache
def _compiles_for(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def by_triton(tensor: Tensor) -> bool:
    """Return whether a kernel should run on `tensor`: on an NVIDIA GPU from Ampere on, or with the interpreter.

    float64 is for oracles and gradient checks and takes the torch path on any device.
    """
    if tensor.dtype == torch.float64 or not _uses_triton():
        return False
    return interpreting() or (tensor.is_cuda and _compiles_for(tensor.device))


def implementation(device: torch.device | str) -> str:
    """Return what computes on a GPU: `triton` and its version, or `torch`."""
    if not by_triton(torch.empty(0, device=device)):
        return "torch"
    try:
        return f"triton {version('triton')}"
    except PackageNotFoundError:  # a build of another name
        return "triton"


def architecture(device: torch.device) -> int:
    """Return the architecture whose tuning a device uses."""
    if device.type != "cuda":
        return 90
    return tuned_for(torch.cuda.get_device_capability(device)[0])


def tuned_for(major: int) -> int:
    """Return the architecture whose tuning GPUs of a compute capability use: 90 for Hopper and data-center Blackwell.

    All others use 80: consumer GPUs of any generation have less shared memory than Hopper, 99 KiB for a program.
    """
    return 90 if major in (9, 10) else 80


def dot_ready(tensor: Tensor) -> Tensor:
    """Return `tensor`, contiguous, in a dtype that the kernel's `tl.dot` multiplies correctly.

    The interpreter stores bfloat16 as integers and multiplies those, so it gets float32.
    """
    if interpreting() and tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.contiguous()


def on_its_device(
    launch: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """Launch kernels on the GPU of the first tensor; Triton alone would use the current GPU.

    The layers of a model can be on several GPUs. `launch` raises UserError for a GPU that a kernel is too large for.
    """

    @wraps(launch)
    def launched(first_tensor: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(first_tensor):  # changes nothing for a tensor on a CPU
            try:
                return launch(first_tensor, *args, **kwargs)
            except Exception as error:
                if type(error).__name__ != _TOO_LARGE:
                    raise
                too_large: Any = error
                raise UserError(
                    f"a Triton kernel needs more {too_large.name} than this GPU has ({too_large.required} instead of "
                    f"{too_large.limit}); set {SWITCH}=0 to compute in torch"
                ) from error

    return launched


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled ahead of time for the CI check in `benchmarks/compile_kernels.py`.

    Attributes:
        name: Name in the table.
        kernel: The `triton.jit` function.
        types: Triton type of every non-constant argument, such as `*bf16`, `i32`, `fp32`.
        constants: Values of the `tl.constexpr` arguments.
        warps: Warps per program.
        stages: Stages of software pipelining.
        aligned: Integer arguments guaranteed by the launch to be multiples of 16 (pointers are).
        expect: Instructions that the code must contain, each a choice of opcodes separated by `|`:
            `("HGMMA|HMMA", "LDGSTS|UBLKCP|UTMALDG")` requires that a dot runs on the tensor cores and that its operands
            arrive by asynchronous copies.
        variant: Whether this is a second size of another kernel; `--quick` leaves it out.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    aligned: tuple[str, ...] = ()
    expect: tuple[str, ...] = ()
    variant: bool = False


TENSOR_CORES = {80: "HMMA", 90: "HGMMA"}
"""Opcodes of a dot that runs on the tensor cores, by architecture."""
ASYNC_COPY = "LDGSTS|UBLKCP|UTMALDG"
"""Opcodes that copy operands of a pipelined loop to shared memory."""
