"""The name of the hardware."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from kvbench.engine import hardware
from kvbench.engine.hardware import describe_hardware


def test_a_cpu_has_the_name_that_the_system_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert describe_hardware("cpu") == "arm"  # no such file
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast CPU: 2 GHz\nmodel name\t: Fast CPU: 2 GHz\n")
    assert describe_hardware("cpu") == "Fast CPU: 2 GHz"
    assert describe_hardware("mps") == "mps on Fast CPU: 2 GHz"


def test_gpus_of_one_name_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert describe_hardware("cuda") == "NVIDIA H200, NVIDIA L4"
