"""A folder's results are never exchanged, dropped or moved by running again in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench import native
from kvbench.errors import UserError
from kvbench.files import cache_dir
from kvbench.harness import rows
from kvbench.progress import Silent
from kvbench.runs import runner, worker
from kvbench.runs.file_names import MACHINES
from kvbench.runs.grid import Grid
from kvbench.runs.integrity import recorded_hardware, recorded_names
from kvbench.runs.runner import describe, execute
from tests.kvbench.runs.small import small_grid

BRIEF = {"task": "niah_single_1", "policy": "random"}


class Heard(Silent):
    """Keeps the messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def test_fewer_samples_keep_the_larger_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    execute(small_grid(out, **BRIEF, samples=3))
    before, answered = kvbench.load(out)
    monkeypatch.setattr(worker, "load_model", lambda *_, **__: pytest.fail("it generates"))
    heard = Heard()
    fewer = small_grid(out, **BRIEF, samples=1)
    says = f"{out} has 3 samples, which are kept; to run fewer, choose another --out or discard"
    assert "  6 responses, 0 still to generate" in describe(fewer, heard.message)
    again = execute(fewer, heard)
    assert len(heard.lines) == 2 and all(line.startswith(says) for line in heard.lines)
    assert len(again.samples) == len(answered) == 6
    assert again.cells["score"].tolist() == before["score"].tolist()
    assert Grid.from_yaml(out / "grid.yaml").samples == 3
    same = Heard()
    execute(small_grid(out, **BRIEF, samples=3), same)
    assert same.lines == []


def test_the_larger_set_is_what_the_tables_hold_and_not_what_was_begun(tmp_path: Path) -> None:
    out = tmp_path / "run"
    execute(small_grid(out, **BRIEF, samples=1))
    grid = out / "grid.yaml"
    grid.write_text(grid.read_text().replace("samples: 1", "samples: 40"))  # and then Ctrl-C
    heard = Heard()
    assert len(execute(small_grid(out, **BRIEF, samples=1), heard).samples) == 2
    assert heard.lines == []


def test_responses_of_other_data_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "run"
    execute(small_grid(out, **BRIEF, samples=2))
    (file,) = (cache_dir() / "data").rglob("*.jsonl")
    head, *lines = file.read_text().splitlines()
    row: dict[str, Any] = json.loads(lines[1])
    row["outputs"] = ["another"]
    body = "\n".join([lines[0], json.dumps(row), ""])
    file.write_text(f"{head}\n{body}")
    again = execute(small_grid(tmp_path / "again", **BRIEF, samples=2))
    assert again.cells["score"].tolist() == kvbench.load(out)[0]["score"].tolist(), "made anew"
    # The same change by a generator that gives every row its digest.
    code = next(iter(rows.code_digest(name) for name in ("kvbench_tasks.ruler",)))
    head = json.dumps({"rows": rows._digest_of_rows(file, code, body)})
    file.write_text(f"{head}\n{body}")
    tables = [(out / name).read_bytes() for name in ("cells.parquet", "samples.parquet")]
    with pytest.raises(UserError, match=r"niah_single_1: sample 1.* is not the one that") as error:
        execute(small_grid(out, **BRIEF, samples=2))
    assert "\n" not in str(error.value)
    assert tables == [(out / name).read_bytes() for name in ("cells.parquet", "samples.parquet")]


def test_a_machine_is_recorded_before_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    grid = small_grid(tmp_path / "run", **BRIEF, samples=1)
    with monkeypatch.context() as patched:
        patched.setitem(runner._EXECUTORS, "local", interrupted)
        patched.setattr(runner, "describe_hardware", lambda device: "CPU A")
        patched.setattr(native, "implementation", lambda: "another")
        with pytest.raises(KeyboardInterrupt):
            execute(grid)
    execute(grid)
    assert recorded_hardware(grid.path)[0] == "CPU A" and len(recorded_hardware(grid.path)) == 2
    assert recorded_names(grid.path, "cpu_code") == ["another", native.implementation()]
    assert not (grid.path / MACHINES).exists(), "the tables have it"
    (grid.path / MACHINES).write_text("{")
    execute(small_grid(tmp_path / "run", **BRIEF, samples=2))
    assert recorded_names(grid.path, "cpu_code") == ["another", native.implementation()]


def test_a_run_says_why_native_code_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(Silent, "message", lambda reporter, text: said.append(text))
    monkeypatch.setattr(native, "load", lambda: (None, "cc cannot compile it"))
    execute(small_grid(tmp_path / "run", **BRIEF, samples=1))
    assert [text for text in said if "native" in text] == [
        "torch computes what native code would compute faster: cc cannot compile it"
    ]


def test_every_machine_that_generated_responses_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = "CPU A"
    monkeypatch.setattr(runner, "describe_hardware", lambda device: f"{machine} ({device})")
    grid = small_grid(tmp_path / "run", **BRIEF, samples=1)
    assert recorded_hardware(grid.path) == []
    execute(grid)
    assert recorded_hardware(grid.path) == ["CPU A (cpu)"]
    assert recorded_names(grid.path, "cpu_code") == [native.implementation()]
    machine = "CPU B"
    monkeypatch.setattr(native, "implementation", lambda: "another")
    execute(grid)  # nothing is generated
    assert recorded_hardware(grid.path) == ["CPU A (cpu)"]
    execute(small_grid(tmp_path / "run", **BRIEF, samples=2))
    assert recorded_hardware(grid.path) == ["CPU A (cpu)", "CPU B (cpu)"]
    assert recorded_names(grid.path, "cpu_code")[1:] == ["another"]
    execute(grid, fresh=True)
    assert recorded_hardware(grid.path) == ["CPU B (cpu)"]


def test_a_plugin_that_changes_the_folder_does_not_move_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    plugin = tmp_path / "mover.py"
    plugin.write_text(f"import os\ndef mover(v):\n    os.chdir({str(away)!r})\n    return v.noise()\n")
    grid = small_grid(Path("out"), task="niah_single_1", policy=f"{plugin}:mover", samples=1)
    done = execute(grid)
    assert done.path == tmp_path / "out"
    assert len(kvbench.load(done.path)[0]) == 2
    assert not list(away.iterdir())


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/y"])
def test_a_name_that_no_folder_can_have_is_one_line(tmp_path: Path, name: str) -> None:
    grid = small_grid(tmp_path / name, **BRIEF, samples=1)
    for run in (execute, lambda grid: describe(grid, lambda _: None)):
        with pytest.raises(UserError, match=r"cannot write .*: File name too long$"):
            run(grid)
    with pytest.raises(UserError, match=r"cannot read .*: File name too long$"):
        kvbench.load(tmp_path / name)
