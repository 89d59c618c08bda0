"""Kernels run on the GPU of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvbench.engine.kernels import launch as launching
from kvbench.engine.kernels.launch import by_triton, on_its_device, triton_version
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


@pytest.fixture
def anew() -> Iterator[None]:
    """Nothing is known about Triton or the GPUs, before and after."""
    for known in (launching._has_triton, launching._compiles_for, launching.interpreting):
        known.cache_clear()
    yield
    for known in (launching._has_triton, launching._compiles_for, launching.interpreting):
        known.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("capability", "switch", "dtype", "expected"),
    [
        ((8, 0), None, torch.bfloat16, True),
        ((9, 0), "1", torch.float32, True),
        ((12, 1), None, torch.float16, True),
        ((7, 5), None, torch.float16, False),
        ((9, 0), "0", torch.float32, False),
        ((9, 0), None, torch.float64, False),
    ],
)
def test_kernels_run_on_gpus_for_which_triton_compiles(
    capability: tuple[int, int], switch: str | None, dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(launching.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(launching.SWITCH, switch)
    monkeypatch.setattr(launching, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with Devices():
        assert by_triton(torch.zeros(2, dtype=dtype, device="cuda")) == expected
        assert not by_triton(torch.zeros(2, dtype=dtype))
    assert (triton_version() == "") == (switch == "0")
