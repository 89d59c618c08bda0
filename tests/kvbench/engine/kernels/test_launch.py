"""Kernels run on the GPU of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvbench.engine.kernels.launch import on_its_device


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
