"""The peak of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

MIB = 1024**2


def allocated(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that torch's allocator gave out at the peak of a call, less those from before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    total = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak
