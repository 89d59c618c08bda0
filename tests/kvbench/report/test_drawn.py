"""Figures that a folder has already are kept only if they would be drawn the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench import registry
from kvbench.report import heatmap, pareto_figures
from kvbench.report.drawn import report_figures
from kvbench.report.figure_options import FigureOptions
from kvbench.report.frames import Results, prepare

from .conftest import make_run, save_two_metrics

OPTIONS = FigureOptions(formats=("svg",), labels={"snapkv": "SnapKV"})


@pytest.fixture
def results() -> Results:
    return prepare(*make_run(["snapkv", "keydiff"], ("0.1", "0.2"), ["niah"], samples=6, depths=(0, 50, 100)))


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions that have drawn."""
    called: list[str] = []
    for module, name in ((pareto_figures, "draw_fronts"), (heatmap, "draw_heatmaps")):
        draw = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *inputs, draw=draw, name=name: called.append(name) or draw(*inputs)
        )  # fmt: skip
    return called


def test_figures_of_the_same_results_are_kept(results: Results, draws: list[str], tmp_path: Path) -> None:
    drawn = report_figures(results, tmp_path, OPTIONS)
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for figure in drawn for path in figure.paths}
    assert {path.name for path in files} == {"pareto-niah.svg", "depth-niah.svg"}
    assert report_figures(results, tmp_path, OPTIONS) == drawn
    assert draws == ["draw_fronts", "draw_heatmaps"]
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files} == files


def test_figures_of_other_scores_policies_or_depths_are_drawn(
    results: Results, draws: list[str], tmp_path: Path
) -> None:
    cells, samples = make_run(["snapkv", "keydiff"], ("0.1", "0.2"), ["niah"], samples=6, depths=(0, 50, 100))
    others = [
        replace(results, cells=results.cells.assign(score=results.cells["score"] + 1e-15)),
        replace(results, policies=results.policies[::-1]),  # other colours
        prepare(cells, samples.assign(extra=samples["extra"].str.replace("100", "99"))),
    ]
    for other in others:
        report_figures(results, tmp_path, OPTIONS)
        draws.clear()
        report_figures(other, tmp_path, OPTIONS)
        assert draws == ["draw_fronts", "draw_heatmaps"]


def test_figures_with_other_options_or_code_are_drawn(
    results: Results, draws: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_figures(results, tmp_path, OPTIONS)
    report_figures(results, tmp_path, replace(OPTIONS, labels={"snapkv": "Snap"}))
    assert len(draws) == 4
    monkeypatch.setattr(registry, "code_state", lambda: "edited")
    report_figures(results, tmp_path, replace(OPTIONS, labels={"snapkv": "Snap"}))
    assert len(draws) == 6


@pytest.mark.parametrize("damage", ["changed", "removed", "record cut", "record of another form"])
def test_damaged_figures_are_drawn(results: Results, draws: list[str], tmp_path: Path, damage: str) -> None:
    (front, *_) = report_figures(results, tmp_path, OPTIONS)
    (path,), record = front.paths, tmp_path / ".drawn.json"
    content = path.read_bytes()
    if damage == "changed":
        path.write_bytes(content + b" ")
    elif damage == "removed":
        path.unlink()
    else:
        record.write_text(record.read_text()[:-9] if damage == "record cut" else '{"shown": 1}')
    report_figures(results, tmp_path, OPTIONS)
    assert len(draws) == 4
    assert path.read_bytes() == content


def test_a_second_report_imports_no_matplotlib(tmp_path: Path) -> None:
    run_folder = save_two_metrics(make_run(["snapkv"], ("0.1",), ["vt"], samples=4), tmp_path / "run")
    command = (
        "import sys; from kvbench.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('matplotlib' in sys.modules)"
    )
    arguments = ["report", str(run_folder), "--quiet"]
    printed = [
        subprocess.run(
            [sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    summary = str(run_folder / "report" / "summary.md")
    assert printed == [[summary, "True"], [summary, "False"]]
