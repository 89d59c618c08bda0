"""The files that a report's tables are written to."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench.report import render
from kvbench.report.panel import MOST_TASKS
from kvbench.report.terminal import run_table


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "tables").iterdir()}


def test_tables_of_a_task_hold_the_numbers_of_its_cells(run_frames: Any, tmp_path: Path) -> None:
    cells, samples = run_frames(["snapkv", "knorm"], ("0.2", "0.4"), ["vt"], samples=12)
    render(cells, samples, tmp_path)
    files = written(tmp_path)
    assert set(files) == {"scores-vt.csv", "scores-vt.tex"}
    rows = list(csv.DictReader(files["scores-vt.csv"].splitlines()))
    assert len(rows) == len(cells) == 5
    for row in rows:
        (cell,) = cells[(cells["policy"] == row["policy"]) & (cells["budget"] == row["budget"])].to_dict("records")
        for name in ("score", "score_lo", "score_hi"):
            assert float(row[name]) == pytest.approx(cell[name])
        if cell["policy"] != "full":
            assert float(row["difference to full"]) == pytest.approx(cell["diff"])
    caption = r"\caption{\texttt{reference} · \texttt{ruler}: \texttt{vt}, metric \texttt{string\_"
    assert caption.replace("·", r"$\cdot$") in files["scores-vt.tex"]
    assert files["scores-vt.tex"].count(r"\texttt{snapkv}") == 2


def test_every_panel_has_files_of_its_own(run_frames: Any, tmp_path: Path) -> None:
    tasks = [f"task_{i}" for i in range(MOST_TASKS + 1)]
    cells, samples = run_frames(["snapkv"], ("0.2",), tasks, lengths=(512, 1024))
    paths = render(cells, samples, tmp_path)
    want = {
        f"{name}-ruler{part}-{length}-tokens.{ending}"
        for name, part in (("mean", ""), ("tasks", "-1"), ("tasks", "-2"))
        for length in (512, 1024)
        for ending in ("csv", "tex")
    }
    assert set(written(tmp_path)) == want
    assert {path.name for path in paths if path.parent.name == "tables"} == want
    assert ": Mean of 9 tasks." in written(tmp_path)["mean-ruler-512-tokens.tex"]
    assert "512 tokens: " in written(tmp_path)["mean-ruler-512-tokens.tex"]
    # What is split over two tables in the summary is split in the same way here.
    head = written(tmp_path)["tasks-ruler-2-512-tokens.csv"].splitlines()[0]
    assert head == "policy,budget,task_8"


def test_tables_with_codes_show_allocated_bytes_beside_live_ones(run_frames: Any, tmp_path: Path) -> None:
    cells, samples = run_frames(["snapkv:bits=4"], ("0.2",), samples=10)
    codes = cells["policy"] != "full"
    cells["kv_bytes_allocated"] *= codes.map({True: 1.3, False: 1.2})
    render(cells, samples, tmp_path)
    full, few = csv.DictReader(written(tmp_path)["mean-ruler.csv"].splitlines())
    assert float(full["KV allocated"]) == pytest.approx(1.2)
    assert float(few["KV allocated"]) == pytest.approx(1.3 * float(few["KV held"]))
    render(*run_frames(["snapkv"], ("0.2",), samples=10), tmp_path / "whole")
    assert "KV allocated" not in written(tmp_path / "whole")["mean-ruler.csv"]


def test_distances_stand_beside_scores_where_they_were_measured(run_frames: Any):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"])
    measured = cells.assign(kl=[1e-13 if policy == "full" else 0.25 for policy in cells["policy"]])
    console = Console(width=200)
    with console.capture() as capture:
        console.print(run_table(measured, samples))
    full, policy = [line for line in capture.get().splitlines() if "│ full" in line or "│ snapkv" in line]
    assert "KL, nats" in capture.get() and "0.2500" in policy and "e-13" not in full
    with console.capture() as capture:
        console.print(run_table(measured.assign(metric="kl", score=0.25), samples))
        console.print(run_table(cells, samples))
    assert "KL, nats" not in capture.get(), "it is the score itself, or was not measured"
