"""`kvbench view` and `kvbench report --html`: when a page is written, and whether it is opened."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

import pytest
import yaml

from kvbench.cli import call
from kvbench.runs.file_names import SAMPLES
from kvbench.runs.store import RunStore

from ..report.conftest import make_run, save_two_metrics
from ..report.page.conftest import data_of


def save_small(folder: Path) -> Path:
    """Write a small run without a grid."""
    with RunStore(folder) as store:
        store.write(*make_run(["snapkv"], ("0.2",), ["vt"], samples=5))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_small(tmp_path)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was opened; the browser is there if nobody changes the answer."""
    seen: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(seen.append(url)) or True)
    return seen


def test_view_writes_a_page_once_and_opens_it(run: Path, opened: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page = run / "report" / "report.html"
    assert call(["view", str(run)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert opened == [page.as_uri()]
    page.write_text("mine")
    assert call(["view", str(run), "--no-open"]) == 0
    assert page.read_text() == "mine"
    assert len(opened) == 1


@pytest.mark.parametrize("command", ["view", "report"])
def test_the_page_names_the_command_that_repeats_the_run(run: Path, opened: list[str], command: str) -> None:
    stored = {
        "policies": ["./x y.py:Mine", "snapkv"],
        "tasks": ["vt"],
        "samples": 5,
        "device": "auto",
        "out": "results/mine",
    }
    (run / "grid.yaml").write_text(yaml.safe_dump(stored))
    assert call([command, str(run), "--no-open" if command == "view" else "--html"]) == 0
    (shown,) = data_of(run / "report" / "report.html")["commands"]
    assert shown == "kvbench run --policy './x y.py:Mine,snapkv' --task vt --samples 5"


def test_view_writes_the_page_again_if_results_are_newer(run: Path, opened: list[str]) -> None:
    page = run / "report" / "report.html"
    page.parent.mkdir()
    page.write_text("old")
    assert call(["view", str(run), "--no-open"]) == 0
    assert page.read_text() == "old"
    os.utime(run / SAMPLES, (1, 1))  # replaced with an earlier table, as `cp -p` does
    assert call(["view", str(run), "--no-open"]) == 0
    assert page.read_text() != "old"


def test_view_without_a_browser_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert call(["view", str(run)]) == 0
    assert "cannot open a browser" in capsys.readouterr().err


def test_view_of_something_else_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["view", str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_report_writes_the_page_if_asked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["report", str(run), "--quiet"]) == 0
    assert not (run / "report" / "report.html").exists()
    assert call(["report", str(run), "--html"]) == 0
    assert f"wrote {run}/report/report.html" in capsys.readouterr().out.splitlines()
    assert (run / "report" / "report.html").is_file()


def test_another_metric_has_a_page_of_its_own(
    tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_two_metrics(make_run(["snapkv"], ("0.2",), ["vt"], samples=5), tmp_path / "run")
    assert call(["view", str(run)]) == call(["view", str(run), "--metric", "missed"]) == 0
    own, missed = (Path(line) for line in capsys.readouterr().out.splitlines())
    assert missed == run / "report" / "missed" / "report.html" and own == run / "report" / "report.html"
    assert "missed" in missed.read_text() and "missed" not in own.read_text()
    assert call(["report", str(run), "--metric", "missed", "--quiet"]) == 0
    assert capsys.readouterr().out == f"{run / 'report' / 'missed' / 'summary.md'}\n"
    assert call(["report", str(run), "--metric", "missed", "--with-published"]) == 2
    assert "leave out --metric" in capsys.readouterr().err


def test_view_of_a_folder_of_runs_lists_them(
    tmp_path: Path, opened: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    save_small(results / "run")
    (results / "begun").mkdir()
    (results / "begun" / "grid.yaml").write_text("policies: [h2o]")
    assert call(["view", str(results)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{results / 'index.html'}\n" and opened == [(results / "index.html").as_uri()]
    assert f"kvbench: {results / 'begun'} is not a finished run: cells.parquet is missing" in shown.err.splitlines()
    assert (results / "run" / "report" / "report.html").is_file()
    assert call(["view", str(results), "--out", str(tmp_path / "site"), "--no-open"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'site' / 'index.html'}\n"
    assert call(["view", str(results / "run"), "--out", str(tmp_path / "one"), "--no-open"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'one' / 'report.html'}\n"
    assert len(opened) == 1


def test_view_of_a_folder_without_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert call(["view", str(tmp_path)]) == 2
    assert f"no run in {tmp_path}; name the folder of a run" in capsys.readouterr().err
