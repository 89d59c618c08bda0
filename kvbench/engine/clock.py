"""Device-synchronised time."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
