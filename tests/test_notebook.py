"""The notebook, cell by cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "first_run.ipynb"


def code() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: dict[str, Any] = {}
    for number, source in enumerate(code(), 1):
        exec(compile(source, f"cell {number}", "exec"), seen)  # a display is a line of no effect
    assert not seen["run"].failed
    assert not seen["run"].left_out
    assert len(seen["lost"]) > 0
    assert len(seen["axes"].containers) == 4
    pyplot.close(seen["figure"])
    assert (tmp_path / "results/notebook/scores.png").read_bytes().startswith(b"\x89PNG")
    assert "## Cheapest policy within 1 point of the full cache" in capsys.readouterr().out


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
