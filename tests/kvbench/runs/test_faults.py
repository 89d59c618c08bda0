"""Real runs that are harmed in every way lose and repeat nothing.

What a fault does to the files alone is in `test_store.py`; `benchmarks/faults.py` kills at random.
With `make faults` the same happens to runs on Ray.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import kvbench
from benchmarks.faults import problems, workers_of
from kvbench.errors import UserError
from kvbench.runs import worker
from kvbench.runs.runner import execute
from tests.kvbench.runs.children import INTERRUPTED, MISUSE, Child, lines
from tests.kvbench.runs.small import small_grid
from tests.sweeps import slow


@pytest.fixture(scope="module")
def on_ray() -> Iterator[dict[str, Any]]:
    """The fields of a grid that is executed on a Ray of this process."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'kvbench[ray]'")
    started = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield {
        "executor": "ray",
        "ray_address": started.address_info["address"],
        "workers": 2,
    }
    ray.shutdown()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.faults)])
def place(request: pytest.FixtureRequest) -> Any:
    """The fields of a grid that say where it is executed."""
    return request.getfixturevalue("on_ray") if request.param == "ray" else {}


def resumed(grid: Any, undisturbed: Any) -> None:
    """The same command ends the run, which then equals an undisturbed one."""
    before = lines(grid.path)
    child = Child(grid)
    assert child.end() == (0, "")
    assert lines(grid.path)[: len(before)] == before
    assert problems(grid.path, undisturbed.path) == []


@pytest.mark.parametrize(("sent", "status"), [slow(signal.SIGINT, INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_run_goes_on(tmp_path: Path, undisturbed: Any, place: dict[str, Any], sent: int, status: int) -> None:
    grid = small_grid(tmp_path / "run", **place)
    child = Child(grid, pause=1)
    child.wait_until_it_pauses()
    os.kill(child.process.pid, sent)
    assert child.end() == (status, "")
    assert 0 < len(lines(grid.path)) < len(lines(undisturbed.path))
    assert not (grid.path / "cells.parquet").exists()
    resumed(grid, undisturbed)


def test_a_full_disk_is_one_line_and_keeps_what_was_written(
    tmp_path: Path, undisturbed: Any, place: dict[str, Any]
) -> None:
    grid = small_grid(tmp_path / "run", **place)
    child = Child(grid, file_size=9000)
    status, said = child.end()
    assert status == MISUSE
    assert "responses.jsonl: File too large" in said and "\n" not in said
    content = (grid.path / "responses.jsonl").read_bytes()
    assert content.endswith(b"}\n"), "no torn line is left"
    assert 0 < len(lines(grid.path)) < len(lines(undisturbed.path))
    resumed(grid, undisturbed)


def test_a_disk_that_is_full_when_the_tables_are_written(tmp_path: Path, undisturbed: Any) -> None:
    grid = small_grid(tmp_path / "run")
    execute(grid)
    tables = [grid.path / "cells.parquet", grid.path / "samples.parquet"]
    before = [path.read_bytes() for path in tables]
    child = Child(grid, file_size=4000)
    status, said = child.end()
    assert status == MISUSE
    assert re.search(r"cannot write .*samples\.parquet: .*File too large", said)
    assert [path.read_bytes() for path in tables] == before, "the old tables are whole"
    assert not list(grid.path.glob(".*.part"))
    resumed(grid, undisturbed)


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(
    tmp_path: Path, undisturbed: Any, place: dict[str, Any]
) -> None:
    grid = small_grid(tmp_path / "run", **place)
    child = Child(grid, pause=2)
    child.wait_until_it_pauses()
    before = lines(grid.path)
    with pytest.raises(UserError, match=rf"in use by another run \(process {child.process.pid}\)"):
        execute(grid)
    with pytest.raises(UserError, match="in use by another run"):
        execute(grid, fresh=True)
    assert lines(grid.path) == before
    os.kill(child.process.pid, signal.SIGKILL)
    child.end()
    resumed(grid, undisturbed)


def test_damaged_and_torn_lines_cost_only_themselves(tmp_path: Path, undisturbed: Any, place: dict[str, Any]) -> None:
    grid = small_grid(tmp_path / "run", **place)
    execute(small_grid(tmp_path / "run"))
    intact = lines(grid.path)
    damaged = [*intact]
    damaged[3] = damaged[3].replace(b'"sample_id":"', b'"sample_id":"x')
    (grid.path / "responses.jsonl").write_bytes(b"\n".join(damaged)[:-7])
    with pytest.warns(UserWarning, match=r"1 damaged line\(s\) were moved"):
        execute(grid)
    kept = [line for i, line in enumerate(intact) if i not in (3, len(intact) - 1)]
    assert lines(grid.path)[: len(kept)] == kept, "no other response was generated again"
    assert (grid.path / "responses.jsonl.damaged").read_bytes() == damaged[3] + b"\n"
    (grid.path / "responses.jsonl.damaged").unlink()
    assert problems(grid.path, undisturbed.path) == []


@pytest.mark.parametrize("name", ["cells.parquet", "samples.parquet"])
def test_a_truncated_table_is_one_line_and_is_written_again(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    grid = small_grid(tmp_path / "run")
    execute(grid)
    table = grid.path / name
    table.write_bytes(table.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"(cannot read )?.*{name}") as raised:
        kvbench.load(grid.path)
    assert "\n" not in str(raised.value)
    monkeypatch.setattr(worker, "load_model", lambda *_, **__: pytest.fail("it generates"))
    execute(grid)
    assert problems(grid.path, undisturbed.path) == []


@pytest.mark.parametrize("name", [slow("cells.parquet"), slow("samples.parquet"), "grid.yaml"])
def test_what_a_killed_run_has_half_written_is_no_result_and_is_removed(
    tmp_path: Path, undisturbed: Any, name: str
) -> None:
    grid = small_grid(tmp_path / "run")
    child = Child(grid, pause=1)
    child.wait_until_it_pauses()
    os.kill(child.process.pid, signal.SIGKILL)
    child.end()
    part = grid.path / f".{name}.{child.process.pid}.part"
    part.write_bytes(b"PAR1 torn")
    resumed(grid, undisturbed)
    assert not list(grid.path.glob(".*.part"))


def test_a_cell_that_raises_fails_alone(tmp_path: Path, undisturbed: Any, place: dict[str, Any]) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def broken(v):\n    raise RuntimeError('no luck')\n")
    grid = small_grid(tmp_path / "run", policy=f"snapkv:window=8,random,{bad}:broken", **place)
    done = execute(grid)
    failed = done.cells.status != "ok"
    assert set(done.cells[failed].policy) == {f"{bad}:broken"} and failed.sum() == 2
    assert done.cells[failed].error.str.contains("no luck").all()
    ok = done.samples[done.samples.error == ""]
    columns = ["cell", "sample_id", "response", "score"]
    pd.testing.assert_frame_equal(
        *(frame[columns].sort_values(columns, ignore_index=True) for frame in (ok, undisturbed.samples))
    )


@pytest.mark.faults
def test_every_worker_that_is_killed_is_replaced(tmp_path: Path, undisturbed: Any, on_ray: dict[str, Any]) -> None:
    # One worker: a second one would end this run before the first is replaced.
    grid = small_grid(tmp_path / "run", **{**on_ray, "workers": 1})
    child = Child(grid)
    killed: set[int] = set()
    while len(killed) < 3 and child.process.is_alive():
        for victim in set(workers_of(os.getpid())) - killed:
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        child.process.join(0.05)
    assert child.end() == (0, "") and len(killed) == 3
    assert problems(grid.path, undisturbed.path) == []
