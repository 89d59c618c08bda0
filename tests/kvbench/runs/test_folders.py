from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from kvbench.errors import UserError
from kvbench.runs.folders import RunSummary, default_folder, find_runs
from kvbench.runs.grid import Grid
from kvbench.runs.store import RunStore

GRID = {"policy": "snapkv:window=64", "task": "vt"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(folder: str, statuses: list[str], **more: object) -> Path:
    """A folder as a finished run leaves it, as far as a list of runs reads it."""
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "grid.yaml").write_text("models: [reference]\npolicies: [snapkv]\ntasks: [vt]\n")
    (path / "responses.jsonl").write_text("{}\n")
    pd.DataFrame({"status": statuses}).to_parquet(path / "cells.parquet")
    return path


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "reference-vt-snapkv"),
        ({"model": "Qwen/Qwen3-8B", "task": "./data/mine.jsonl"}, "Qwen3-8B-mine-snapkv"),
        ({"policy": "./my_policy.py:MyPolicy:a=1,snapkv"}, "reference-vt-MyPolicy+snapkv"),
        ({"policy": "a,b,c,d"}, "reference-vt-a+b+2"),
        ({"model": "./models/../odd \x1b[31m/"}, "odd_31m-vt-snapkv"),
    ],
)
def test_the_name_of_a_folder_can_be_read(more: dict[str, str], name: str) -> None:
    grid = Grid.from_dict(GRID | more)
    assert grid.path == Path("results") / f"{name}-{grid.digest[:8]}"


def test_a_folder_named_after_the_digest_alone_is_still_found() -> None:
    grid = Grid.from_dict(GRID)
    Path("results", grid.digest).mkdir(parents=True)
    assert Grid.from_dict(GRID).path == Path("results", grid.digest)
    assert Grid.from_dict(GRID | {"samples": 7}).path == Path("results", grid.digest)
    assert Grid.from_dict(GRID | {"seed": 1}).path != Path("results", grid.digest)


def test_a_folder_whose_names_are_shortened_otherwise_is_still_found() -> None:
    earlier = Path("results", "another-name-0123abcd")
    earlier.mkdir(parents=True)
    assert default_folder("0123abcd" * 2, ["m"], ["t"], ["p"]).name == "m-t-p-0123abcd"
    (earlier / "grid.yaml").write_text("")
    assert default_folder("0123abcd" * 2, ["m"], ["t"], ["p"]) == earlier


# --- what a folder holds --------------------------------------------------------------------------


def by_path(root: str = "results") -> dict[str, RunSummary]:
    return {run.path: run for run in find_runs(Path(root))}


def test_runs_are_found_at_any_depth_with_their_cells_and_their_state() -> None:
    write_run("results/a", ["ok", "ok", "error"])
    write_run("results/ablations/runs/b", ["ok"])
    Path("results/empty").mkdir()
    runs = by_path()
    assert set(runs) == {"results/a", "results/ablations/runs/b"}
    found = runs["results/a"]
    assert (found.ok, found.failed, found.state) == (2, 1, "finished")
    assert (found.models, found.policies, found.tasks) == (["reference"], ["snapkv"], ["vt"])


def test_a_run_that_stopped_is_not_finished() -> None:
    first = write_run("results/no-tables", [])
    (first / "cells.parquet").unlink()
    more = write_run("results/more-samples", ["ok"])
    late = (more / "cells.parquet").stat().st_mtime_ns + 10**9
    os.utime(more / "responses.jsonl", ns=(late, late))
    assert {run.state for run in by_path().values()} == {"stopped"}


def test_a_run_that_has_its_folder_open_is_running() -> None:
    with RunStore("results/a") as store:
        store.save_grid({"models": ["m"], "policies": ["p"], "tasks": ["t"]})
        assert by_path()["results/a"].state == "running"
    assert by_path()["results/a"].state == "stopped"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("grid.yaml", b"a: [1"),
        ("grid.yaml", b"\xff\xfe\x00"),
        ("grid.yaml", b"- a list"),
        ("grid.yaml", b"[" * 5000),
        ("cells.parquet", b"PAR1 but not really"),
        ("cells.parquet", b""),
    ],
)
def test_a_damaged_folder_is_a_line_and_hides_no_other(name: str, content: bytes) -> None:
    write_run("results/good", ["ok"])
    bad = write_run("results/bad", ["ok"])
    (bad / name).write_bytes(content)
    runs = by_path()
    assert runs["results/good"].state == "finished"
    assert runs["results/bad"].state == "broken"
    assert name in runs["results/bad"].problem
    assert "\n" not in runs["results/bad"].problem


def test_parquet_of_another_program_and_a_missing_grid_are_broken() -> None:
    other = write_run("results/other", ["ok"])
    pd.DataFrame({"x": [1]}).to_parquet(other / "cells.parquet")
    none = write_run("results/none", ["ok"])
    (none / "grid.yaml").unlink()
    assert {run.state for run in by_path().values()} == {"broken"}


def test_a_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="results is not a folder"):
        find_runs(Path("results"))
