"""The time, once a device has finished its work."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
