"""The synthetic run that `benchmarks.scale` measures is one that kvbench scores."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvbench
from benchmarks.scale import TASKS, Shape, fill
from kvbench import cli

pytestmark = pytest.mark.slow  # a run is planned twice


def test_a_filled_folder_is_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape, folder = Shape(policies=1, budgets=2, samples=3), tmp_path / "run"
    fill(shape.grid(folder))
    assert cli.call(["run", "--config", str(folder / "grid.yaml"), "--quiet"]) == 0
    cells, samples = kvbench.load(folder)
    assert len(cells) == shape.cells == 3 * len(TASKS)
    assert len(samples) == shape.responses and (samples["stop"] == "eos").all()
    assert set(cells["status"]) == {"ok"}
