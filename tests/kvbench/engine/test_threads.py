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
