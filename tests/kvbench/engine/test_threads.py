"""How many cores a model may use, by affinity and by the quota of the cgroup."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvbench.engine import threads


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cgroup's file; without it there is no cgroup. The process may run on 4 cores."""
    for name in ("_CPU_MAX", "_CPU_QUOTA", "_CPU_PERIOD"):
        monkeypatch.setattr(threads, name, tmp_path / name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    return tmp_path / "_CPU_MAX"


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        (None, 4),
        ("max 100000", 4),
        ("150000 100000", 2),
        ("800000 100000", 4),
        ("10000 100000", 1),
    ],
)
def test_cores_are_limited_by_the_quota(quota: Path, text: str | None, cores: int) -> None:
    if text is not None:
        quota.write_text(text)
    assert threads.available_cores() == cores


@pytest.mark.usefixtures("quota")
def test_only_a_large_model_takes_all_cores() -> None:
    small, large = (torch.nn.Linear(n, n, device="meta") for n in (8, 5000))
    assert threads.pick_threads(small) == 1
    assert threads.pick_threads(large) == 4


@pytest.mark.parametrize(("smallest_large", "reports"), [(0, 1), (10**6, 0)])
def test_only_a_quota_that_slows_a_model_is_reported(
    quota: Path, smallest_large: int, reports: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota.write_text("150000 100000")
    chosen: list[int] = []
    lines: list[str] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "SMALL", smallest_large)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    with threads.thread_budget(torch.nn.Linear(8, 8), lines.append):
        assert chosen == [2 if reports else 1]
    assert chosen[-1] == 4
    assert len(lines) == reports
    assert all("CPU threads: 2, " in line for line in lines)
