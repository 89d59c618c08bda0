"""Kernels run on the GPU of their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvbench.engine.kernels import launch as launching
from kvbench.engine.kernels.launch import by_triton, implementation, on_its_device
from kvbench.errors import UserError
from tests.devices import Devices


def test_a_launch_is_on_the_device_of_its_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Tensor] = []
    launched: list[int] = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        entered.append(x)
        yield
        entered.clear()

    @on_its_device
    def launch(x: Tensor, factor: int, more: int = 0) -> int:
        assert len(entered) == 1 and entered[0] is x
        launched.append(factor + more)
        return int(x) * factor + more

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    assert launch(torch.tensor(3), 2, more=1) == 7
    assert launched == [3] and not entered


def launched(error: Exception) -> None:
    @on_its_device
    def launch(x: Tensor) -> None:
        raise error

    launch(torch.tensor(3))


def test_a_kernel_that_is_too_large_for_a_gpu_is_refused() -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="triton is not installed")
    message = (
        "a Triton kernel needs more shared memory than this GPU has (102656 instead of 101376); "
        "set KVBENCH_TRITON=0 to compute in torch"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        launched(errors.OutOfResources(102656, 101376, "shared memory"))


def test_other_errors_of_a_launch_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"):
        launched(RuntimeError("something else"))


@pytest.mark.parametrize(("major", "expected"), [(8, 80), (9, 90), (10, 90), (12, 80)])
def test_only_gpus_of_data_centers_take_the_sizes_of_hopper(
    major: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert launching.architecture(torch.device("cuda")) == expected


@pytest.fixture
def no_cached_facts() -> Iterator[None]:
    """Ask about Triton and the GPU again, before and after the test."""
    cached_functions = (launching._uses_triton, launching._compiles_for, launching.interpreting)
    for function in cached_functions:
        function.cache_clear()
    yield
    for function in cached_functions:
        function.cache_clear()


@pytest.mark.usefixtures("no_cached_facts")
@pytest.mark.parametrize(
    ("capability", "hip", "switch", "dtype", "expected"),
    [
        ((8, 0), None, None, torch.bfloat16, True),
        ((9, 0), None, "1", torch.float32, True),
        ((12, 1), None, None, torch.float16, True),
        ((7, 5), None, None, torch.float16, False),
        ((9, 4), "6.2", None, torch.float16, False),
        ((9, 0), None, "0", torch.float32, False),
        ((9, 0), None, None, torch.float64, False),
    ],
)
def test_kernels_run_on_gpus_for_which_triton_compiles(
    capability: tuple[int, int],
    hip: str | None,
    switch: str | None,
    dtype: torch.dtype,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(launching.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(launching.SWITCH, switch)
    monkeypatch.setattr(launching, "find_spec", lambda name: name)
    monkeypatch.setattr(launching, "version", lambda name: "9.9")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with Devices():
        assert by_triton(torch.zeros(2, dtype=dtype, device="cuda")) == expected
        assert not by_triton(torch.zeros(2, dtype=dtype))
        if dtype != torch.float64:
            assert implementation("cuda") == ("triton 9.9" if expected else "torch")
