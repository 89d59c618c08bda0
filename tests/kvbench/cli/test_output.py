"""What commands print: quiet, JSON, panels of the help, completion, odd terminals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench import cli
from kvbench.progress import Silent
from tests.sweeps import slow

EVIL = """
import torch
def mine(v):
    print("noise of a policy")
    raise RuntimeError("\\x1b[31mred\\x07 − 日本")
def fine(v):
    print("noise of a policy")
    return v.value.float().norm(dim=-1)
"""


@pytest.fixture
def run(llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that runs three cells on a tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    row = {"context": "the code is 7. " * 4, "question": "code?", "answers": "x"}
    Path("mine.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    Path("evil.py").write_text(EVIL, encoding="utf-8")
    return ["run", "--task", "./mine.jsonl", "--model", llama_folder, "--policy"]


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvbench", *arguments],
        capture_output=True,
        env=os.environ | environment,
        check=False,
    )


# --- quiet and JSON -------------------------------------------------------------------------------


def test_quiet_prints_the_path_alone(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call([*run, "knorm", "--budget", "1", "--quiet"]) == 0
    captured = capsys.readouterr()
    folder = Path(captured.out.removesuffix("\n"))
    assert (folder / "cells.parquet").is_file()
    assert captured.err == ""
    assert cli.call(["report", str(folder), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{folder}/report/summary.md\n"
    assert captured.err == ""


def test_json_is_all_that_stdout_gets(run: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.call([*run, "./evil.py:fine", "--out", "there", "--json"]) == 0
    captured = capfd.readouterr()
    found = json.loads(captured.out)
    assert found["path"] == "there"
    assert {cell["policy"] for cell in found["cells"]} == {"full", "./evil.py:fine"}
    assert found["failed"] == {} and found["left_out"] == {}
    assert "noise of a policy" in captured.err
    assert cli.call(["report", "there", "--against", "./evil.py:fine", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert len(found["cells"]) == 2
    assert found["files"][0] == "there/report/summary.md"
    assert {row["policy"] for row in found["means"]} == {"full", "./evil.py:fine"}


def test_json_tells_of_failed_cells(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call([*run, "./evil.py:mine", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert len(found["failed"]) == 1
    assert captured.out.isascii()
    assert "1 of 2 cells failed" in captured.err


def test_json_and_dry_run_exclude_each_other(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call([*run, "knorm", "--json", "--dry-run"]) == 2
    assert "exclude each other" in capsys.readouterr().err


# --- odd terminals --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        slow({"PYTHONIOENCODING": "latin-1"}),
        slow({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ],
)
def test_names_and_exceptions_reach_no_terminal_as_they_are(run: list[str], environment: dict[str, str]) -> None:
    done = program(*run, "./evil.py:mine", **environment)
    assert done.returncode == 1, done.stderr
    both = done.stdout + done.stderr
    assert b"\x1b" not in both and b"\x07" not in both
    assert rb"\x1b[31mred\x07" in both
    assert b"Traceback" not in both
    assert b"| full" in done.stdout  # a table of ASCII characters
    if "latin-1" not in environment.values():
        assert both.isascii()


def test_help_can_be_shown_in_ascii() -> None:
    done = program("run", "--help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"--policy" in done.stdout
    assert done.stdout.isascii()


FULL = "kvbench: cannot write the output: No space left on device\n"


def test_a_full_disk_is_one_line_of_the_program() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-m", "kvbench", "--help"], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.decode() == FULL


@pytest.mark.parametrize("arguments", [["--help"], ["list", "policies"], ["list", "tasks"]])
def test_a_full_disk_is_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert cli.call(arguments) == 1
    assert capsys.readouterr().err == FULL


def test_a_reader_that_has_gone_is_no_error() -> None:
    code = f"{sys.executable} -m kvbench list tasks --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout in ("141\n", "0\n")  # 0: everything was written before the reader went
    assert done.stderr == ""


# --- help and completion --------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100])
def test_the_help_of_run_is_grouped(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    assert cli.call(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    panels = ["What to run", "Model", "Prompts", "Answers", "Cache", "Machines", "Output"]
    found = re.findall(r"╭─ ([\w ]+?) ─", text)
    assert [name for name in found if name != "Options"] == panels
    for flag in ("--policy", "--task", "--model", "--budget", "--length", "--moment"):
        lines = text[text.index(f"│ {flag} ") :].split("│ --", 2)[1]
        assert re.search("comma-separated", " ".join(lines.replace("│", " ").split())), flag


@pytest.mark.parametrize(
    "command",
    [
        *(f"analyze {name}" for name in ("perturbation", "allocation", "retention", "causes")),
        "train gates",
        "profile heads",
    ],
)
def test_long_lists_of_options_are_grouped(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert {"What to run", "Model", "Output"} <= set(re.findall(r"╭─ ([\w ]+?) ─", text))
    rest = re.search(r"╭─ Options ─.*?╰", text, re.DOTALL)
    assert rest is not None and rest[0].count(" --") == 1  # --help


def completing(line: str) -> dict[str, str]:
    """What bash sets at Tab."""
    return {"_KVBENCH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}


def test_the_program_completes() -> None:
    done = program(**completing("kvbench run --policy critical_s"))
    assert (done.returncode, done.stdout.split()) == (0, [b"critical_snapkv"]), done.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvbench run --policy critical_s", ["critical_snapkv"]),
        ("kvbench run --policy snapkv,critical_s", ["snapkv,critical_snapkv"]),
        ("kvbench run --task niah_single_", [f"niah_single_{n}" for n in (1, 2, 3)]),
        ("kvbench run --model ref", ["reference", "reference-vl"]),
        ("kvbench run --moment que", ["question"]),
        ("kvbench analyze allocation --policy pyramidk", ["pyramidkv"]),
        ("kvbench train gates --policy tr", ["trimkv"]),
        ("kvbench list ru", ["runs"]),
        ("kvbench data fetch gsm8k_s", ["gsm8k_strict"]),
        ("kvbench published crit", ["criticalkv"]),
        ("kvbench published trimkv ", [str(n) for n in range(1, 10)]),
        ("kvbench published d2o 2", ["2", "20", "21"]),
    ],
)
def test_values_are_completed(line: str, offered: list[str]) -> None:
    done = CliRunner().invoke(cli.app.app, [], env=completing(line), prog_name="kvbench")
    assert (done.exit_code, done.output.split()) == (0, offered)


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvbench.cli import complete; "
        "complete.policies(''), complete.tasks(''), complete.models(''); "
        "print(sorted({'torch', 'transformers', 'pandas', 'lm_eval'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_completion_can_be_installed(tmp_path: Path) -> None:
    code = "exec -a bash bash -c 'kvbench --install-completion; true'"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", code],
        env=os.environ | {"HOME": str(tmp_path), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "completion installed" in done.stdout, done
    written = [p.read_text() for p in tmp_path.rglob("*") if p.is_file()]
    assert any("_KVBENCH_COMPLETE=complete_bash" in text for text in written)


# --- names and budgets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--task", "rulr", "unknown task 'rulr'; did you mean ruler, "),
        ("--task", "zzzz", "unknown task 'zzzz' (kvbench list tasks --search WORD shows all)"),
        ("--policy", "snapvk", "unknown policy 'snapvk'; did you mean snapkv"),
        ("--policy", "wxyz", "(kvbench list policies shows all)"),
        ("--model", "refernce", "did you mean reference"),
    ],
)
def test_an_unknown_name_lists_the_nearest_and_never_all(
    option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {"--task": "vt", "--policy": "snapkv", "--model": "reference"} | {option: value}
    assert cli.call(["run", *(word for pair in usual.items() for word in pair)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1 and len(said) < 200


@pytest.mark.parametrize(("budget", "lines"), [slow("1", 1), ("1,0.2", 1), slow("1.0", 0), ("2", 0)])
def test_a_budget_of_one_entry_is_pointed_out(
    run: list[str], budget: str, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call([*run, "knorm", "--budget", budget]) == 0
    said: Any = [line for line in capsys.readouterr().err.splitlines() if "budget 1" in line]
    assert len(said) == lines
    assert all("use 1.0 or full" in line for line in said)


def test_what_is_left_out_is_one_line_per_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = ["run", "--policy", "knorm", "--samples", "1", "--length", "256"]
    assert cli.call([*usual, "--task", "longbench,aime24,gsm8k,niah_single_1"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(said) == 1
    assert said[0].startswith("longbench, aime24, gsm8k are left out: the reference model")


def test_a_run_says_at_once_that_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Screen(Silent):
        def busy(self, text: str) -> None:
            said.extend([text, str("kvbench.runs.runner" in sys.modules)])

    monkeypatch.setattr("kvbench.cli.run.progress", Screen)
    monkeypatch.delitem(sys.modules, "kvbench.runs.runner", raising=False)
    assert cli.call(["run", "--policy", "zzz", "--task", "vt", "--model", "reference"]) == 2
    assert said == ["loading model reference", "False"]
