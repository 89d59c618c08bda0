"""CPU threads for a model, and time that is read when its device has finished its work.

Torch's threads spin while they wait for each other. If other work keeps the cores busy (CI, a container with a CPU
quota), two spinning threads can be many times slower than one, and a small model gains nothing from more than one.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

SMALL = 20_000_000
"""Parameter count below which matrix products are too small to gain from a second thread."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's `mallopt`."""

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_CPU_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def available_cores() -> int:
    """Return the cores available to this process: its affinity, limited by its cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, math.ceil(min(cores or 1, _quota())))  # the quota can be infinite


def _quota() -> float:
    """Return the cores that the cgroup (version 2 or 1) allows; infinite without a quota."""
    try:
        if _CPU_MAX.exists():
            quota, period = _CPU_MAX.read_text().split()
        else:
            quota, period = _CPU_QUOTA.read_text(), _CPU_PERIOD.read_text()
        return math.inf if quota.strip() in ("max", "-1") else float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def pick_threads(model: nn.Module) -> int:
    """Return the threads for a model on the CPU: one if it is small, otherwise one per available core."""
    return 1 if _is_small(model) else available_cores()


def _is_small(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) < SMALL


@contextmanager
def thread_budget(model: nn.Module, report_line: Callable[[str], None]) -> Iterator[None]:
    """Run a model on the CPU with as many threads as it gains from, and keep the memory that it frees.

    `OMP_NUM_THREADS` takes precedence: if it is set, the threads stay as they are.

    Args:
        report_line: Receives a message if a CPU quota allows fewer threads than torch would start.
    """
    default = torch.get_num_threads()
    threads = default
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu:
        _keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ and on_cpu:
        threads = min(default, pick_threads(model))
    if threads != default:
        if not _is_small(model):  # a small model loses nothing, so there is nothing to report
            report_line(f"CPU threads: {threads}, the CPU quota of this machine (OMP_NUM_THREADS overrides it)")
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(default)


@functools.cache
def _keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory instead of giving it back to the system after every forward.

    Tensors of up to 32 MiB, glibc's limit, then reuse memory. Otherwise the system clears new pages for every
    operation, which costs a grid on the CPU 5 to 10%. The user's own `MALLOC_...` settings take precedence.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if set_option is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        set_option(_TRIM_THRESHOLD, 1 << 30)
        set_option(_MMAP_THRESHOLD, 1 << 25)


def now(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
