from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer

import kvbench
from kvbench import cli, registry
from kvbench.cli import listing
from kvbench.engine import model_check
from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.plugin_facts import PluginFacts
from kvbench.runs import load
from kvbench.runs.grid import Grid

from ..report.conftest import make_run

RUN = ["run", "--policy", "snapkv", "--task", "vt"]

Execute = Callable[..., Any]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Replace what runs and reads a grid; holds the call's arguments, `effect` and `cells`."""
    monkeypatch.chdir(tmp_path)
    seen: dict[str, Any] = {"effect": None, "cells": pd.DataFrame({"status": ["ok"]})}

    def execute(grid: Grid, **options: Any) -> Any:
        seen.update(grid=grid, **options)
        options["reporter"].start(1, "work")
        if seen["effect"]:
            raise seen["effect"]
        grid.path.mkdir(parents=True)
        (grid.path / "cells.parquet").touch()
        return types.SimpleNamespace(path=grid.path, cells=seen["cells"], samples=None)

    runner = types.ModuleType("kvbench.runs.runner")
    vars(runner)["execute"] = execute
    vars(runner)["describe"] = lambda grid, message, **options: ["3 cells", f"into {grid.path}"]
    monkeypatch.setitem(sys.modules, "kvbench.runs.runner", runner)
    tables = types.ModuleType("kvbench.report.terminal")
    vars(tables)["run_table"] = lambda cells, samples: "THE TABLE"
    monkeypatch.setitem(sys.modules, "kvbench.report.terminal", tables)
    monkeypatch.setattr(load, "load_frames", lambda path, *_, **__: (seen["cells"], None))
    return seen


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert text.startswith("kvbench: ")
    return text


# --- usage ----------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvbench import cli; status = cli.call(['--help']); "
        "heavy = {'torch', 'transformers', 'pandas', 'pyarrow', 'lm_eval', 'numpy'}; "
        "print(sorted(heavy & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
    assert "Usage: kvbench" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["-h"], ["run", "--help"], ["list", "-h"]])
def test_help_is_never_an_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(arguments) == 0
    assert "Usage: kvbench" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["run --help", "train --help", "train gates -h", "list", "report --nope", "rnu", "Run --help", "compare a"]
)
def test_a_command_alone_says_what_it_says_among_all(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = cli.call(line.split()), capsys.readouterr()
    monkeypatch.setattr(cli.app, "_command", lambda name: typer.main.get_command(cli.app.app))
    assert (cli.call(line.split()), capsys.readouterr()) == alone
    assert alone[1].out or alone[1].err


def test_help_says_that_a_budget_is_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    cli.call(["run", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Part of the cache that is KEPT" in text
    assert "In kvpress a ratio is the fraction removed" in text


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["--version"]) == 0
    assert capsys.readouterr().out == f"kvbench {kvbench.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rnu"], "run"),
        (["run", "--polciy", "x"], "--policy"),
        (["run", "--policy"], "--policy"),
        ([*RUN, "--samples", "many"], "--samples"),
        ([*RUN, "--samples", "0"], "samples must be an integer"),
        ([*RUN, "--budget", "1.5"], "budget 1.5 is out of range"),
        ([*RUN, "--budget", "0.2,abc"], "budget 'abc'"),
        ([*RUN, "--length", "1k"], "length must be an integer"),
        ([*RUN, "--moment", "turns"], "vt has no turns"),
        ([*RUN, "--dry-run", "--out", f"{__file__}/x"], "is a file, not a folder"),
        ([*RUN, "--moment", "quesion"], "did you mean question"),
        ([*RUN, "--dtype", "fp8"], "unknown dtype 'fp8'"),
        ([*RUN, "--config", "none.yaml"], "cannot read none.yaml"),
        (["run", "--task", "vt"], "give --policy"),
        (["run", "--policy", "snapkv"], "give --task"),
        (["list", "polices"], "did you mean policies"),
        (["list"], "policies|tasks|models"),
        (["report"], "RUN..."),
        (["report", "nowhere"], "nowhere is not a folder"),
        (["check"], "POLICY"),
        (["view", "a\0b"], "contains a NUL character"),
        ([*RUN, "--samples", "9" * 5000], "--samples"),
        ([*RUN, "--policy", "x" * 5000], "unknown policy 'xxx"),
        ([*RUN, "--task", "\udcff"], "tasks contains a character that is not UTF-8"),
        (["x" * 5000], "xxx"),
        (["list", "runs", "x" * 5000], "is not a folder"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(arguments) == 2
    captured = capsys.readouterr()
    assert says in one_line(captured.err)
    assert len(captured.err) < 700
    assert captured.out == ""


def test_a_models_self_test_is_printed_and_its_failure_is_exit_code_1(
    llama_folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.call(["list", "models", "--check", llama_folder]) == 0
    assert re.search(r"LlamaAttention +2 ", capsys.readouterr().out)
    assert cli.call(["list", "models", "--check", llama_folder, "--json"]) == 0
    (module,) = json.loads(capsys.readouterr().out)["modules"]
    assert module["error"] <= module["limit"]
    assert cli.call(["list", "models", "--check", "./nowhere"]) == 2
    assert cli.call(["list", "tasks", "--check", llama_folder]) == 2
    capsys.readouterr()
    monkeypatch.setattr(model_check, "_LIMIT", -1.0)
    assert cli.call(["list", "models", "--check", llama_folder]) == 1
    assert "llama attention differs from transformers' by" in one_line(capsys.readouterr().err)


def test_a_fault_of_ours_keeps_its_traceback(executed: dict[str, Any]) -> None:
    executed["effect"] = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.call(RUN)


# --- run ------------------------------------------------------------------------------------------


def test_run_without_flags_is_the_grid_of_the_defaults(executed: dict[str, Any]) -> None:
    assert cli.call(RUN) == 0
    assert executed["grid"] == Grid(policies=("snapkv",), tasks=("vt",))
    assert executed["fresh"] is False


def test_every_flag_of_run_arrives(executed: dict[str, Any]) -> None:
    flags = (
        "run --policy criticalkv,snapkv:window=64 --policy h2o --budget 0.2,512 --model a,b "
        "--task ruler,./mine.jsonl --moment context,question --length 1024,4096 --samples 7 "
        "--seed 3 --out there --device cuda:1 --dtype bfloat16 --batch-size 4 "
        "--revision v1 --no-chat-template --no-full --fresh"
    )
    assert cli.call(flags.split()) == 0
    assert executed["grid"] == Grid(
        policies=("criticalkv", "snapkv:window=64", "h2o"),
        tasks=("ruler", "./mine.jsonl"),
        budgets=("0.2", "512"),
        models=("a", "b"),
        moments=("context", "question"),
        lengths=(1024, 4096),
        samples=7,
        seed=3,
        out="there",
        device="cuda:1",
        dtype="bfloat16",
        batch_size=4,
        revision="v1",
        chat_template=False,
        full=False,
    )
    assert executed["fresh"] is True


def test_flags_of_machines_arrive(executed: dict[str, Any]) -> None:
    flags = "--executor ray --ray-address 10.0.0.1:6379 --gpus-per-cell 0.5 --workers 4"
    assert cli.call([*RUN, *flags.split()]) == 0
    assert executed["grid"] == Grid(
        policies=("snapkv",),
        tasks=("vt",),
        executor="ray",
        ray_address="10.0.0.1:6379",
        gpus_per_cell=0.5,
        workers=4,
    )


def test_flags_go_before_the_file_and_the_file_before_the_defaults(
    executed: dict[str, Any],
) -> None:
    Path("grid.yaml").write_text("policies: [h2o]\ntasks: vt\nbudgets: 0.1\nsamples: 5\nfull: false\n")
    assert cli.call(["run", "--config", "grid.yaml", "--budget", "0.4", "--full"]) == 0
    assert executed["grid"] == Grid(policies=("h2o",), tasks=("vt",), budgets=("0.4",), samples=5, full=True)


def test_after_a_run_the_table_and_the_files_are_named(
    executed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call([*RUN, "--out", "there"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "THE TABLE",
        "wrote there: cells.parquet",
        "figures: kvbench report there",
    ]


def test_a_dry_run_describes_and_runs_nothing(executed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call([*RUN, "--out", "there", "--dry-run"]) == 0
    assert "grid" not in executed
    assert capsys.readouterr().out == "3 cells\ninto there\n"


def test_a_failed_cell_is_exit_code_1(executed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    executed["cells"] = pd.DataFrame({"status": ["ok", "error"], "error": ["", "held 3\nnot 2"]})
    assert cli.call(RUN) == 1
    captured = capsys.readouterr()
    assert "THE TABLE" in captured.out
    assert one_line(captured.err) == "kvbench: 1 of 2 cells failed: held 3 not 2\n"


def test_ctrl_c_says_how_to_go_on(executed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    executed["effect"] = KeyboardInterrupt()
    assert cli.call([*RUN, "--out", "there"]) == 130
    said = one_line(capsys.readouterr().err)
    assert "kept in there" in said
    assert "the same command" in said


def test_a_user_error_of_a_run_is_one_line(executed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    executed["effect"] = UserError("model x:\n no such folder")
    assert cli.call(RUN) == 2
    assert one_line(capsys.readouterr().err) == "kvbench: model x: no such folder\n"


# --- list -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["policies", "tasks", "models"])
def test_list_shows_what_is_registered(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["list", kind]) == 0
    text = capsys.readouterr().out
    assert cli.call(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows
    assert all(row["name"] in text for row in rows)


def test_list_policies_tells_paper_parts_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    cli.call(["list", "policies", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["criticalkv"]["parts"]["select"] == "two_stage"
    assert rows["snapkv"]["parameters"]["window"] == 32
    assert rows["snapkv"]["paper"]
    assert rows["critical_adakv"]["is"] == "criticalkv"
    assert rows["full"]["parts"] == {}


def test_a_broken_plugin_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = registry.get

    def get(group: str, name: str) -> Any:
        if name == "snapkv":
            raise UserError("policy 'snapkv' of package x cannot be loaded: ImportError: y")
        return real(group, name)

    monkeypatch.setattr(registry, "get", get)
    assert cli.call(["list", "policies"]) == 1
    captured = capsys.readouterr()
    assert "criticalkv" in captured.out
    assert "package x" in one_line(captured.err)


# --- report ---------------------------------------------------------------------------------------


def test_report_names_what_it_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(policies=["snapkv"], budgets=["0.4"], tasks=["vt"], samples=8)
    monkeypatch.setattr(load, "load_frames", lambda *_, **__: made)
    monkeypatch.chdir(tmp_path)
    for arguments, folder in ((["a", "b"], "a/report"), (["a", "--out", "c"], "c")):
        assert cli.call(["report", *arguments]) == 0
        named = re.findall("^wrote (.*)$", capsys.readouterr().out, re.MULTILINE)
        assert f"{folder}/summary.md" in named
        assert all((tmp_path / name).stat().st_size for name in named)


# --- the whole way --------------------------------------------------------------------------------


def test_a_run_a_resumed_run_and_their_report(
    llama_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "context": f"the code is {n} and the sky is grey. " * 4,
            "question": "code?",
            "answers": "x",
        }
        for n in range(3)
    ]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["run", "--policy", "snapkv", "--task", "./mine.jsonl", "--model", llama_folder]
    assert cli.call([*command, "--out", "there", "--samples", "2"]) == 0
    said = capsys.readouterr()
    assert "cells.parquet" in said.out
    first = Path("there/responses.jsonl").read_bytes()
    assert first.count(b"\n") == 4  # two samples, for full and for snapkv
    assert cli.call([*command, "--out", "there", "--samples", "3"]) == 0
    more = Path("there/responses.jsonl").read_bytes()
    assert more.startswith(first)
    assert more.count(b"\n") == 6
    assert cli.call(["run", "--config", "there/grid.yaml"]) == 0
    assert Path("there/responses.jsonl").read_bytes() == more
    capsys.readouterr()
    assert cli.call(["report", "there"]) == 0
    written = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert all(Path(path).is_file() for path in written)


def test_names_of_tasks_are_never_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.call(["list", "tasks"]) == 0
    words = set(capsys.readouterr().out.replace(",", " ").split())
    groups, _ = catalogue.benchmarks()
    assert {leaf for group in groups.values() for leaf in group.leaves} <= words


def test_the_list_says_who_can_see_a_task_and_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(name: str) -> str:
        assert cli.call(["list", "tasks"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        start = text.index(f" {name} {name} ")
        return text[start : start + 500]

    monkeypatch.setattr(listing, "lacking", lambda bench: "")
    assert "for models that see images; scored by lmms_eval mt_bench" in shown("mmstar")
    monkeypatch.setattr(listing, "lacking", lambda bench: "needs a package; install it")
    assert "scored by lmms_eval; needs a package; install it mt_bench" in shown("mmstar")


@pytest.mark.parametrize(
    ("given", "command", "spins", "numpy_threads"),
    [
        ({}, "report", "10000", "1"),
        ({}, "run", "10000", None),
        ({"GOMP_SPINCOUNT": "7"}, "run", "7", None),
        ({"OMP_WAIT_POLICY": "active"}, "run", None, None),
        ({"OPENBLAS_NUM_THREADS": "4"}, "table", "10000", "4"),
    ],
)
def test_waiting_threads_sleep_early_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], command: str, spins: str | None, numpy_threads: str | None
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvbench", command])
    monkeypatch.setattr(os, "environ", {**given})
    monkeypatch.setattr(cli.app, "call", lambda arguments: 0)
    monkeypatch.setattr(cli.app, "_collect_after_startup", lambda: None)
    monkeypatch.setattr(PluginFacts, "uses_cache", False)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with pytest.raises(SystemExit):
        cli.app.main()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    assert os.environ.get("OPENBLAS_NUM_THREADS") == numpy_threads
