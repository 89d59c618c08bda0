"""A run whose folder gets more policies, budgets or tasks keeps everything and repeats nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import kvbench
from benchmarks.faults import problems
from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute
from tests.kvbench.runs.children import Child, lines
from tests.kvbench.runs.small import small_grid

SMALL: dict[str, Any] = {"policy": "snapkv:window=8", "task": "niah_single_1"}


def extended(path: Path) -> list[str]:
    """The command that makes the small run of it."""
    more = "--policy random --task niah_single_2 --quiet --extend"
    return ["run", "--out", str(path), *more.split()]


def test_what_is_added_is_generated_and_all_else_is_kept(tmp_path: Path, undisturbed: Any) -> None:
    grid = small_grid(tmp_path / "run", **SMALL)
    execute(grid)
    before = lines(grid.path)
    assert call(extended(grid.path)) == 0
    assert lines(grid.path)[: len(before)] == before
    assert problems(grid.path, undisturbed.path) == []
    whole = lines(grid.path)
    assert call(extended(grid.path)) == 0, "the same command again has nothing to do"
    assert lines(grid.path) == whole
    assert Grid.from_yaml(grid.path / "grid.yaml").digest == undisturbed_digest()
    with pytest.raises(UserError, match=r"with other policies, tasks; add to it with --extend"):
        execute(grid)


def undisturbed_digest() -> str:
    return small_grid(Path("unused")).digest


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_extends_goes_on(tmp_path: Path, undisturbed: Any) -> None:
    grid = small_grid(tmp_path / "run", **SMALL)
    execute(grid)
    before = lines(grid.path)
    child = Child(small_grid(tmp_path / "run"), pause=1, extend=True)
    child.wait_until_it_pauses()
    with pytest.raises(UserError, match="in use by another run"):
        execute(small_grid(tmp_path / "run"), extend=True)
    os.kill(child.process.pid, signal.SIGKILL)
    assert child.end() == (-signal.SIGKILL, "")
    more = lines(grid.path)
    assert more[: len(before)] == before and len(more) > len(before)
    assert call(extended(grid.path)) == 0
    assert lines(grid.path)[: len(more)] == more
    assert problems(grid.path, undisturbed.path) == []


def test_only_more_of_the_same_extends_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = small_grid(tmp_path / "run", **SMALL, samples=1)
    execute(grid)
    held = {path.name: path.read_bytes() for path in grid.path.iterdir() if path.name[0] != "."}
    assert call(["run", "--out", str(grid.path), "--extend", "--seed", "3"]) == 2
    assert "with other seed; choose another --out" in capsys.readouterr().err
    with pytest.raises(UserError, match="with other policies; choose another --out"):
        kvbench.run(grid.to_dict() | {"policies": "random"}, progress=False, extend=True)
    assert {path.name: path.read_bytes() for path in grid.path.iterdir() if path.name in held} == (held)


@pytest.mark.parametrize("flags", ["", "--dry-run"])
def test_tables_without_responses_are_not_replaced(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = small_grid(tmp_path / "run", **SMALL, samples=1)
    execute(grid)
    (grid.path / "responses.jsonl").unlink()
    tables = {path: path.read_bytes() for path in grid.path.glob("*.parquet")}
    assert call([*extended(grid.path), *flags.split()]) == 2
    says = capsys.readouterr().err
    assert "has tables but no responses.jsonl to go on from; put that file back, choose another --out" in says
    assert {path: path.read_bytes() for path in tables} == tables and len(tables) == 3
    assert call([*extended(grid.path)[:-1], "--fresh", *flags.split()]) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--policy random", "--extend needs the run's folder; add --out DIR"),
        ("--policy random --out nowhere", "nowhere holds no run to extend: grid.yaml is missing"),
        ("--out there --fresh", "--extend and --fresh exclude each other"),
        ("--out there --config grid.yaml", "--extend and --config exclude each other"),
        ("--out there --recipe criticalkv-table1", "--extend and --recipe exclude each other"),
    ],
)
def test_what_cannot_be_extended_is_one_line(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "--extend", *flags.split()]) == 2
    assert says in capsys.readouterr().err


def test_lists_are_added_and_other_flags_replaced(tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("policies: [h2o]\ntasks: vt\nbudgets: [0.1, 64]\nsamples: 5\nout: elsewhere\n")
    more = {"policy": "snapkv,h2o", "budgets": 0.4, "samples": 9, "out": str(tmp_path)}
    grid = Grid.extending(file, more)
    assert grid == Grid(
        policies=("h2o", "snapkv"),
        tasks=("vt",),
        budgets=("0.1", "64", "0.4"),
        samples=9,
        out=str(tmp_path),
    )
    held = Grid.from_yaml(file)
    assert grid.lacks(held) == [] and grid.differs(held) == held.differs(grid)
    assert set(grid.differs(held)) == set(held.lacks(grid)) == {"policies", "budgets"}
