"""`kvbench analyze` from the outside."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from kvbench import cli

FRAMES = {"heads", "layers", "pairs", "policies"}


def arguments(command: str, folder: str, task: str, out: Path, *more: str) -> list[str]:
    base = ["analyze", command, "--model", folder, "--task", task, "--samples", "4"]
    return [*base, "--no-chat-template", "--device", "cpu", "--out", str(out), *more]


def test_perturbation_writes_tables_figures_and_a_summary(grouped: str, questions: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    run = arguments("perturbation", grouped, questions, out)
    run += ["--policy", "snapkv:window=4,criticalkv:window=4", "--budget", "0.2,0.4"]
    done = CliRunner().invoke(cli.app.app, run)
    assert done.exit_code == 0, done.output
    assert "who perturbs less" in " ".join(done.output.split())
    assert {p.stem for p in out.glob("*.parquet")} == FRAMES
    names = {p.name for p in (out / "figures").iterdir()}
    pair = "heads-criticalkv-window-4-"
    assert {n.split(".")[-1] for n in names} == {"png", "svg"}
    assert sum(n.startswith(pair) for n in names) == 2
    assert {n.split("-mine")[0] for n in names if not n.startswith("heads")} == {
        "budgets", "layers", "layers-forward", "assumption-snapkv-window-4-b40f08",
        "assumption-criticalkv-window-4-8f0284",
    }  # fmt: skip
    summary = (out / "summary.md").read_text()
    for name in names:
        assert (name.endswith(".svg")) != (f"](figures/{name})" in summary)
    heads = pd.read_parquet(out / "heads.parquet")
    assert set(heads["policy"]) == {"snapkv:window=4", "criticalkv:window=4"}
    assert heads["entries"].dtype == "int32" and (heads["schema"] == 1).all()
    settings = json.loads((out / "settings.json").read_text())
    assert settings["query"] == "answer" and settings["first_stage"] == 0.5


def test_allocation_writes_a_table_and_a_map_per_policy(grouped: str, questions: str, tmp_path: Path) -> None:
    run = arguments("allocation", grouped, questions, tmp_path, "--policy", "snapkv,adakv:window=4")
    done = CliRunner().invoke(cli.app.app, [*run, "--budget", "0.2,12"])
    assert done.exit_code == 0, done.output
    assert "entries per layer and KV head" in " ".join(done.output.split())
    table = pd.read_parquet(tmp_path / "allocation.parquet")
    assert len(table) == 2 * 2 * 3 * 2
    maps = {p.name.split("-")[1].split("-")[0] for p in (tmp_path / "figures").glob("*.png")}
    assert maps == {"snapkv", "adakv"}
    assert "## " in (tmp_path / "summary.md").read_text()


def test_figures_are_the_same_bytes_every_time(grouped: str, questions: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = arguments("perturbation", grouped, questions, tmp_path / name)
        run += ["--policy", "snapkv:window=4,random"]
        assert CliRunner().invoke(cli.app.app, run).exit_code == 0
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*g"))
    assert len(files) == 10
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_policy_that_fails_leaves_the_others_and_exit_code_1(
    grouped: str, questions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(
        '"""Fails."""\ndef bad(v):\n    """Fail."""\n    raise RuntimeError("no such luck")\n'
    )
    for command in ("perturbation", "allocation"):
        run = arguments(command, grouped, questions, tmp_path / command)
        code = cli.call([*run, "--policy", f"snapkv:window=4,{tmp_path}/bad.py:bad"])
        said = capsys.readouterr()
        assert code == 1
        assert said.err.splitlines()[-1].startswith("kvbench: 1 cells failed: RuntimeError: no such")
        assert "no such luck" in (tmp_path / command / "summary.md").read_text()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--policy", "full"], "evicts nothing"),
        (["--policy", "snapkv", "--budget", "full"], "evicts nothing"),
        (["--policy", "snapkv", "--budget", "1.5"], "out of range"),
        (["--policy", "snapkv", "--query", "asnwer"], "did you mean answer?"),
        (["--policy", "snapkv", "--first-stage", "2"], "share in [0, 1]"),
        (["--policy", "snapkv", "--moment", "decode"], "moment"),
        (["--policy", "snpkv"], "snapkv"),
        ([], "--policy"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    more: list[str],
    says: str,
    grouped: str,
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = cli.call(arguments("perturbation", grouped, questions, tmp_path / "x", *more))
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1 and error.startswith("kvbench: ") and says in error


def test_a_folder_that_is_a_file_is_refused_before_any_work(
    grouped: str, questions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text("mine")
    run = arguments("allocation", grouped, questions, tmp_path / "x", "--policy", "snapkv")
    assert cli.call(run) == 2
    assert "is a file, not a folder" in capsys.readouterr().err


def test_a_full_disk_leaves_no_unfinished_figure(
    grouped: str,
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Figure.savefig

    def until_full(figure: Figure, path: Path, **options: Any) -> None:
        if options["format"] == "svg":
            Path(path).write_bytes(b"")
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", until_full)
    for command in ("perturbation", "allocation"):
        out = tmp_path / command
        run = arguments(command, grouped, questions, out, "--policy", "snapkv:window=4,random")
        assert cli.call(run) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("kvbench: cannot write") and "No space left on device" in line
        files = [path for path in out.rglob("*") if path.is_file()]
        assert [path.suffix for path in files] == [".png"] and files[0].stat().st_size


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvbench import cli; "
        "commands = [], ['perturbation'], ['allocation'], ['retention'], ['vision']; "
        "status = [cli.call(['analyze', *more, '--help']) for more in commands]; "
        "print(sorted({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] [0, 0, 0, 0, 0]"
