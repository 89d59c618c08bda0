"""Runs of an earlier commit resume without generating anything: no hash has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

import kvbench
from kvbench import registry
from kvbench.engine import model_check
from kvbench.runs import cell, worker
from kvbench.runs.grid import Grid

RECORDED = Path(__file__).parents[2] / "recorded"
RUNS = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())
NUMBERS = ["score", "score_lo", "score_hi", "full_score", "diff", "diff_lo", "diff_hi"]


@pytest.fixture
def as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions of the recorded runs; no model can be loaded, and none was tested before."""
    frame = pd.read_parquet(RECORDED / RUNS[0] / "cells.parquet")
    versions = json.loads(frame["versions"][0])
    monkeypatch.setattr(cell, "_installed", versions.__getitem__)
    monkeypatch.setattr(registry, "origin", lambda group, name: versions["policy"])
    monkeypatch.setattr(model_check, "_PASSED", {})
    monkeypatch.setattr(worker, "load_model", lambda *args, **kwargs: pytest.fail("it generates"))


@pytest.mark.usefixtures("as_recorded")
@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_resumes_without_generating(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RECORDED, tmp_path / "recorded")
    monkeypatch.chdir(tmp_path / "recorded")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    grid = Grid.from_yaml(Path(name) / "grid.yaml", {"out": name})
    run = kvbench.run(grid, progress=False)

    before, _ = kvbench.load(RECORDED / name)
    key = ["task", "policy", "budget", "moment"]
    then, now = (frame.sort_values(key, ignore_index=True) for frame in (before, run.cells))
    for column in ("cell", "match", *key, "data_hash", "task_version", "versions", "status"):
        assert list(now[column]) == list(then[column]), column
    pd.testing.assert_frame_equal(now[NUMBERS], then[NUMBERS])
    assert list(run.cells.columns) == list(before.columns)


@pytest.mark.usefixtures("as_recorded")
@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_grid_keeps_its_digest(name: str) -> None:
    digests = json.loads((RECORDED / "digests.json").read_text())
    assert Grid.from_yaml(RECORDED / name / "grid.yaml").digest == digests[name]
