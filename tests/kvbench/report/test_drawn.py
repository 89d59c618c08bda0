"""Figures that a folder has already are kept only if they would be drawn the same."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench import registry
from kvbench.report import heatmap, pareto_figures
from kvbench.report.drawn import report_figures
from kvbench.report.figure_options import FigureOptions
from kvbench.report.frames import Results, prepare
from kvbench.report.sorted_samples import Samples

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
    _, samples = make_run(["snapkv", "keydiff"], ("0.1", "0.2"), ["niah"], samples=6, depths=(0, 50, 100))
    overall = results.cells[results.cells["task"] == "niah"].head(3)  # as if it were a mean
    results = replace(results, overall=overall)
    others = [
        replace(results, overall=overall.assign(score_lo=overall["score_lo"] - 0.01)),
        replace(results, cells=results.cells.assign(score=results.cells["score"] + 1e-15)),
        replace(results, policies=results.policies[::-1]),  # other colours
        replace(results, samples=Samples(samples.assign(extra=samples["extra"].str.replace("100", "99")))),
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


def test_depths_of_policies_that_are_not_drawn_do_not_hide_those_that_are(draws: list[str], tmp_path: Path) -> None:
    cells, samples = make_run(["snapkv", "keydiff"], ("0.1",), ["niah"], samples=6, depths=(0, 50, 100))
    samples.loc[samples["policy"] == "keydiff", "extra"] = "{}"
    chosen = replace(OPTIONS, policies=("snapkv",))
    first = report_figures(prepare(cells, samples), tmp_path, chosen)
    assert len(first) == 2  # a front and a map
    moved = samples.assign(extra=samples["extra"].str.replace("100", "99"))
    report_figures(prepare(cells, moved), tmp_path, chosen)
    assert len(draws) == 4


def test_a_report_without_figures_is_remembered(draws: list[str], tmp_path: Path) -> None:
    cells, samples = make_run(["snapkv"], ("0.1",), ["vt"], samples=4)
    full = prepare(cells[cells["policy"] == "full"], samples)
    assert report_figures(full, tmp_path, FigureOptions()) == report_figures(full, tmp_path, FigureOptions()) == []
    assert len(draws) == 2


def test_two_reports_in_a_folder_draw_one_after_the_other(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [replace(OPTIONS, labels={"snapkv": label}) for label in ("A", "B")]
    is_drawing = threading.Lock()
    draw = pareto_figures.draw_fronts

    def draw_alone(*inputs: Any) -> Any:
        assert is_drawing.acquire(blocking=False)
        time.sleep(0.2)
        is_drawing.release()
        return draw(*inputs)

    monkeypatch.setattr(pareto_figures, "draw_fronts", draw_alone)
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda options: report_figures(results, tmp_path, options), both))) == 2


DAMAGES = ["changed", "removed", "record cut", "record of another form", "figures of another form", "nested"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_figures_are_drawn(results: Results, draws: list[str], tmp_path: Path, damage: str) -> None:
    (front, *_) = report_figures(results, tmp_path, OPTIONS)
    (path,), record = front.paths, tmp_path / ".drawn.json"
    content = path.read_bytes()
    if damage == "changed":
        path.write_bytes(content + b" ")
    elif damage == "removed":
        path.unlink()
    else:
        shown = json.loads(record.read_text())["shown"]
        record.write_text(
            {
                "record cut": record.read_text()[:-9],
                "record of another form": "{}",
                "figures of another form": json.dumps({"shown": shown, "figures": [1]}),
                "nested": "[" * 200_000,
            }[damage]
        )
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
