"""The name of the hardware that a run uses."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPU_FACTS = Path("/proc/cpuinfo")


def describe_hardware(device_type: str) -> str:
    """Return the name of this machine's GPUs or of its CPU.

    Args:
        device_type: Device type such as "cuda" or "cpu".
    """
    if device_type == "cuda" and torch.cuda.is_available():
        names = (torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return ", ".join(dict.fromkeys(names))
    return _cpu_name() if device_type == "cpu" else f"{device_type} on {_cpu_name()}"


def device_name(device: torch.device) -> str:
    """Return the name of one device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else describe_hardware(device.type)


def _cpu_name() -> str:
    try:
        cpu_facts = _CPU_FACTS.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        cpu_facts = ""
    fact_lines = (line.partition(":") for line in cpu_facts.splitlines())
    names = (value.strip() for label, _, value in fact_lines if label.strip() == "model name")
    return next(names, "") or platform.processor() or platform.machine()
