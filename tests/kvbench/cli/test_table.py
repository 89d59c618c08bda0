"""`kvbench table`: its outputs, its defaults and its errors."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kvbench.cli import call

from ..papers.layouts.conftest import write_run
from ..report.conftest import make_run, save_two_metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    frames = make_run(["snapkv", "adakv"], ("0.2", "0.4"), samples=10)
    return str(write_run(frames, tmp_path_factory.mktemp("table") / "run"))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert call(["table", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert call(["table", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_by_default_policies_and_budgets_are_rows(capsys: pytest.CaptureFixture[str], run: str) -> None:
    text = out(capsys, run)
    assert "┃ policy ┃ budget ┃" in text
    assert text.index("snapkv") < text.index("adakv")
    rows = list(csv.DictReader(out(capsys, run, "--format", "csv").splitlines()))
    assert [row["budget"] for row in rows] == ["full", "0.2", "0.4", "0.2", "0.4"]
    assert "cwe_p" in rows[0]
    assert "cwe_p" not in out(capsys, run, "--format", "csv", "--against", "none")


def test_a_published_layout(capsys: pytest.CaptureFixture[str], run: str) -> None:
    arguments = ("--layout", "criticalkv-1", "--reduced", "--format", "markdown")
    text = out(capsys, run, *arguments)
    assert "|  | CWE | VT | Avg. Score | loss ↓ |" in text
    assert "laid out like Table 1 of CriticalKV" in text
    assert "`0.2` for 40%" in out(capsys, run, *arguments, "--use", "40%=0.2")
    assert "published" not in text


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("markdown", "| published | 20.30 | 96.60 | 58.45 | 19.0% |"),
        ("latex", r"published & 20.30 & 96.60 & 58.45 & 19.0\% \\"),
        ("html", '<td class="text">published</td><td>20.30</td><td>96.60</td><td>58.45</td><td>19.0%</td>'),
        ("csv", "published,0.203,,0.966,0.5845,,0.189882189882"),
    ],
)
def test_the_papers_results_stand_below_in_every_format(
    capsys: pytest.CaptureFixture[str], run: str, form: str, row: str
) -> None:
    """CWE and VT of SnapKV as Table 1 prints them, their mean, and the loss against (44.90 + 99.40) / 2."""
    arguments = (run, "--layout", "criticalkv-1", "--reduced", "--with-published")
    assert row in out(capsys, *arguments, "--format", form)


def test_digits(capsys: pytest.CaptureFixture[str], run: str) -> None:
    def decimals(*arguments: str) -> set[int]:
        shown = out(capsys, run, "--format", "markdown", "--against", "none", *arguments)
        shown = " ".join(line for line in shown.splitlines() if line.startswith("|"))
        numbers = [word for word in shown.replace("*", "").split() if word.replace(".", "").isdigit() and "." in word]
        return {len(number.partition(".")[2]) for number in numbers}

    assert decimals() == {1}
    assert decimals("--digits", "3") == {3}
    assert decimals("--layout", "criticalkv-1", "--reduced") == {2}


@pytest.mark.parametrize(
    ("ending", "start"),
    [(".tex", "% \\usepackage"), (".md", "Scores"), (".csv", "policy,"), (".html", "<!doctype")],
)
def test_the_ending_gives_the_format(
    capsys: pytest.CaptureFixture[str], run: str, tmp_path: Path, ending: str, start: str
) -> None:
    path = tmp_path / f"table{ending}"
    assert out(capsys, run, "--out", str(path)) == f"wrote {path}\n"
    assert path.read_text().startswith(start)


def test_what_is_chosen(capsys: pytest.CaptureFixture[str], run: str) -> None:
    text = out(
        capsys, run, "--budget", "0.4", "--policy", "snapkv,adakv", "--rows", "policy",
        "--columns", "task", "--mean", "--against", "snapkv", "--format", "markdown",
    )  # fmt: skip
    assert "budget `0.4`" in text
    assert "than `snapkv` at the same budget" in text
    assert "| policy | `vt` | `cwe` | mean of 2 | loss |" in text


def test_several_runs_are_one_table(capsys: pytest.CaptureFixture[str], run: str, tmp_path: Path) -> None:
    more = write_run(make_run(["random"], ["0.2"], samples=10), tmp_path / "more")
    rows = csv.DictReader(out(capsys, run, str(more), "--format", "csv").splitlines())
    assert {row["policy"] for row in rows} == {"full", "snapkv", "adakv", "random"}


def test_without_the_full_cache_there_are_no_marks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = write_run(make_run(["snapkv"], ["0.2"], samples=6, with_full=False), tmp_path / "bare")
    assert "significantly" not in out(capsys, str(bare))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "criticalkv-1", "--rows", "task"], "--layout excludes --rows"),
        (["--use", "VT=cwe"], "--use, --reduced and --with-published need --layout"),
        (["--with-published"], "need --layout"),
        (["--layout", "criticalkv-9"], "unknown layout 'criticalkv-9'; did you mean"),
        (["--layout", "trimkv-5"], "trimkv-5 cannot be filled: it needs Throughput"),
        (["--rows", "policy"], "choose one with --budget"),
        (["--out", "t.pdf"], "unknown suffix; use .tex, .md, .csv, .html"),
        (["--format", "pdf"], "pdf"),
        (["--against", "h2o"], "--against h2o: not in the run"),
        (["--task", "cwee"], "--task cwee: not in the run; it has vt, cwe"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], run: str, arguments: list[str], message: str) -> None:
    assert message in error(capsys, run, *arguments)


def test_layouts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list", "layouts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(" ".join(line.split()).startswith("criticalkv-1 RULER by task") for line in lines)
    assert any("trimkv-5" in line and "it needs" in line for line in lines)


def test_another_metric(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    frames = make_run(["snapkv", "adakv"], ("0.2",), samples=10)
    run = str(save_two_metrics(frames, tmp_path / "run"))
    (own, missed) = (
        list(csv.DictReader(out(capsys, run, "--format", "csv", *more).splitlines()))
        for more in ((), ("--metric", "missed"))
    )
    for row, other in zip(own, missed, strict=True):
        assert float(row["vt"]) + float(other["vt ↓"]) == pytest.approx(1)
    assert "no task has the metric 'acc'; there are string_match, missed" in error(capsys, run, "--metric", "acc")
