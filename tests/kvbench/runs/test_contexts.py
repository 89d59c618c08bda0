"""Which cells of a context are compressed together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench import native
from kvbench.runs import batching
from kvbench.runs.runner import execute
from kvbench.runs.worker import Worker
from tests.kvbench.runs.small import small_grid

BUDGETS = range(20, 92, 2)


in_place = pytest.mark.skipif(native.library() is None, reason="cells have copies without native code")


@pytest.mark.parametrize(
    ("policy", "rows", "sizes"),
    [
        pytest.param("random", 128, [32, 4], marks=in_place),
        pytest.param("random", 9, [9, 9, 9, 9], marks=in_place),
        ("random:merge=ema", 128, [8, 8, 8, 8, 4]),
    ],
    ids=["read in place", "read in place, after memory ran out", "copies"],
)
def test_only_copies_wait_until_the_batch_can_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, rows: int, sizes: list[int]
) -> None:
    found = []
    compress_all = Worker.compress_all

    def recording(worker: Worker, prefix: Any, cells: Any, *args: Any) -> Any:
        found.append(len(cells))
        return compress_all(worker, prefix, cells, *args)

    monkeypatch.setattr(Worker, "compress_all", recording)
    monkeypatch.setattr(batching, "MOST", rows)
    monkeypatch.setattr(batching, "_ASKED", 1)  # the smallest groups of questions
    budgets = ",".join(map(str, BUDGETS))
    changes = {"cache_memory": None, "task": "niah_single_1", "samples": 1, "full": False}
    execute(small_grid(tmp_path / "run", policy=policy, budget=budgets, **changes))
    assert found == sizes
