"""`kvbench compare` and `kvbench power` as CI and a reader call them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest

from kvbench import cli
from kvbench.runs.integrity import with_record

from ..regression.conftest import rescored, save, usual, without
from ..report.conftest import save_two_metrics

POLICY = """
import torch
def kept(v):
    key = torch.nn.functional.normalize(v.key.float(), dim=-1)
    return {sign} (key * key.mean(-2, keepdim=True)).sum(-1)
"""
"""With a minus it keeps the keys that are least like the others; without, the wrong end."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the run `base` and others that differ from it."""
    monkeypatch.chdir(tmp_path)
    save(usual(), tmp_path / "base")
    save(rescored(usual(), [0.0] * 40), tmp_path / "worse")
    save(usual(budgets=("0.3",)), tmp_path / "other-budgets")
    save(without(usual(), policy="snapkv"), tmp_path / "less")
    save(usual(model="elsewhere"), tmp_path / "elsewhere")
    return tmp_path


@pytest.mark.parametrize(
    ("run", "code", "says"),
    [
        ("base", 0, ""),
        ("worse", 1, "regression in 1 cell, first vt, snapkv at 0.2"),
        ("other-budgets", 2, "which has budget 0.3 instead"),
        ("less", 2, "not in the run"),
        ("elsewhere", 2, "which has model elsewhere instead"),
        ("nowhere", 2, "nowhere is not a folder"),
    ],
)
def test_exit_codes(runs: Path, run: str, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["compare", "base", run]) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == (code != 0)


def test_the_allowance_and_the_level(runs: Path) -> None:
    assert cli.call(["compare", "base", "worse", "--max-drop", "90"]) == 0
    for alpha in ("5", "0", "1e-12"):
        assert cli.call(["compare", "base", "worse", "--alpha", alpha]) == 2
    assert cli.call(["compare", "base", "worse", "--max-drop", "-1"]) == 2


def test_an_unchanged_run_passes_every_time(runs: Path) -> None:
    for samples in range(1, 21):
        save(usual(samples, budgets=("0.2",), tasks=("vt",)), runs / f"run-{samples}")
        assert cli.call(["compare", f"run-{samples}", f"run-{samples}", "--quiet"]) == 0


def test_the_table_shows_what_changed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.call(["compare", "base", "worse"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("snapkv") == 1 and "keydiff" not in shown
    assert "failed" in shown and "9 unchanged" in shown and "can remain undetected" in shown
    assert cli.call(["compare", "base", "base"]) == 0
    assert capsys.readouterr().out.endswith("no regression shown\n")


def test_a_narrow_terminal_cuts_no_word(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.call(["compare", "base", "worse"]) == 1
    shown = capsys.readouterr().out
    for word in ("snapkv", "budget", "change", "corrected p", "contexts"):
        assert word in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if line[:1] in "┏┃┡│├└")


def test_quiet_prints_only_what_is_wrong(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["compare", "base", "base", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.call(["compare", "base", "worse", "--quiet"]) == 1
    assert capsys.readouterr().out == ""


def test_json_is_all_that_stdout_gets(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, code in (("base", 0), ("worse", 1), ("less", 2)):
        assert cli.call(["compare", "base", run, "--json"]) == code
        assert json.loads(capsys.readouterr().out)["exit_code"] == code


def test_files_for_ci(runs: Path) -> None:
    files = ["--markdown", "ci/summary.md", "--junit", "ci/deep/report.xml"]
    assert cli.call(["compare", "base", "worse", *files]) == 1
    assert Path("ci/summary.md").read_text().startswith("## kvbench: regression in 1 cell\n")
    assert ElementTree.parse("ci/deep/report.xml").find("testsuite/testcase/failure") is not None
    assert cli.call(["compare", "base", "base", "--markdown", "base"]) == 2
    assert cli.call(["compare", "base", "base", "--junit", "base/cells.parquet/x"]) == 2


def test_power_of_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["power", "base", "--drop", "5"]) == 0
    shown = capsys.readouterr().out
    assert "to detect a drop of 5 points" in shown and "use --samples" in shown
    assert cli.call(["power", "worse", "--baseline", "base", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cells"] == 1 and len(found["needed_cells"]) == 10


def test_power_from_assumptions(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assumed = ["power", "--rate", "0.8", "--discordance", "0.1"]
    assert cli.call(assumed) == 0
    assert capsys.readouterr().out.startswith("2059 contexts detect a drop of 2 points in 80%")
    assert cli.call([*assumed, "--questions-per-context", "4", "--icc", "0.3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["design_effect"] == pytest.approx(1.9)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a RUN or --rate"),
        (["base", "--rate", "0.8"], "give a RUN or --rate"),
        (["base", "--icc", "0.8"], "go with --rate"),
        (["--rate", "0.8", "--baseline", "base"], "--baseline needs a RUN"),
        (["--rate", "0.8", "--questions-per-context", "0"], "--questions-per-context 0"),
        (["one"], "has one context"),
        (["nowhere"], "is not a folder"),
    ],
)
def test_power_refuses_in_one_line(
    runs: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells, samples = usual(1)
    save((cells, samples), runs / "one")
    assert cli.call(["power", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_policy_that_keeps_the_wrong_end_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the reference model: good twice, then with the sign of its score turned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    command = ["run", "--task", "niah_single_2", "--length", "256", "--samples", "10", "--policy"]
    command += ["./mine.py:kept", "--budget", "0.4", "--quiet", "--out"]
    for folder, sign in (("good", "-"), ("again", "-"), ("broken", "")):
        Path("mine.py").write_text(POLICY.format(sign=sign))
        assert cli.call([*command, folder]) == 0
    assert cli.call(["compare", "good", "again"]) == 0
    assert "2 unchanged" in capsys.readouterr().out
    assert cli.call(["compare", "good", "broken"]) == 1
    captured = capsys.readouterr()
    assert "regression in 1 cell, first niah_single_2, ./mine.py:kept at 0.4" in captured.err
    assert "Settings that differ: policy" in captured.out


def test_what_computed_is_a_setting_where_both_runs_record_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def record(name: str, **facts: list[str]) -> None:
        cells_path = save(usual(), runs / name) / "cells.parquet"
        pq.write_table(with_record(pq.read_table(cells_path), runs / name, facts), cells_path)

    record("native", hardware=["EPYC"], cpu_code=["native"])
    record("torch", hardware=["EPYC"], cpu_code=["torch", "native"], gpu_code=["triton"])
    assert cli.call(["compare", "native", "torch"]) == 0
    assert "Settings that differ: cpu_code native → native, torch.\n" in capsys.readouterr().out
    for names in (("native", "native"), ("base", "torch")):
        assert cli.call(["compare", *names]) == 0
        assert "Settings that differ" not in capsys.readouterr().out


def test_another_metric_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, frames in (("base", usual()), ("worse", rescored(usual(), [0.0] * 40))):
        save_two_metrics(frames, tmp_path / name)
    runs = [str(tmp_path / name) for name in ("base", "worse")]
    assert cli.call(["compare", *runs, "--metric", "missed", "--json"]) == 1
    cells = json.loads(capsys.readouterr().out)["cells"]
    (failed,) = (cell for cell in cells if cell["outcome"] == "failed")
    assert failed["metric"] == "missed" and failed["run"] == 1 and failed["change"] > 0


def test_two_policies_are_compared_in_text_latex_markdown_and_json(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare-policies", "base", "snapkv", "keydiff", "--label", "keydiff=Ours,snapkv=SnapKV"]
    outputs = {}
    for option in ([], ["--format", "latex"], ["--format", "markdown"], ["--json"]):
        assert cli.call([*command, *option]) == 0
        outputs[" ".join(option)] = capsys.readouterr().out
    (record,) = json.loads(outputs["--json"])
    assert " ".join(outputs[""].split()).endswith(record["sentence"])
    assert record["latex"] in outputs["--format latex"]
    assert "| SnapKV | Ours |" in outputs["--format markdown"]


def test_filters_choose_what_two_policies_are_compared_on(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["compare-policies", "base", "snapkv", "keydiff", "--task", "vt", "--budget", "0.2", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["overall"]["tasks"], record["overall"]["budgets"], record["parts"]) == (["vt"], ["0.2"], [])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["snapkv", "keydif"], "did you mean keydiff"),
        (["snapkv", "keydiff", "--task", "fwe"], "--task fwe: not in the run"),
        (["snapkv", "keydiff", "--format", "csv"], "use latex or markdown, or --json"),
        (["snapkv", "keydiff", "--format", "latex", "--json"], "exclude each other"),
        (["snapkv", "keydiff", "--label", "h2o=H"], "no policy 'h2o'"),
        (["snapkv", "keydiff", "--alpha", "2"], "--alpha 2 is out of range"),
    ],
)
def test_a_wrong_comparison_of_policies_is_one_line(
    runs: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["compare-policies", "base", *options]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
