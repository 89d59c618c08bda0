"""`kvbench published`: lists, tables, filters, outputs and errors."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from kvbench.cli import call
from kvbench.papers.published.results import FIELDS, all_figures, paper
from kvbench.runs import load

from ..papers.layouts.conftest import write_run
from ..report.conftest import make_run


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert call(["published", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_papers_and_tables_are_listed_with_counts(capsys: pytest.CaptureFixture[str]) -> None:
    papers = [line.split()[:3] for line in out(capsys).splitlines()[1:]]
    counts = [str(sum(f.paper == name for f in all_figures())) for name, *_ in papers]
    assert [count for *_, count in papers] == counts
    tables = out(capsys, "d2o").splitlines()
    first = paper("d2o").table("1")
    assert any(line.split()[:3] == ["1", str(len(first.figures)), "5.3"] for line in tables)


def test_a_table_is_shown_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "criticalkv", "12")
    assert "LongBench" in text
    assert "44.23" in text
    assert text.index("SnapKV w/ OBCache (Joint)") < text.index("HeadKV w/ ours")


def test_wide_tables_fit_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = out(capsys, "d2o", "1")
    assert max(map(len, text.splitlines())) <= 80
    assert all(f" {f.value} " in text for f in paper("d2o").table("1").figures)


def test_filters_show_what_is_left_of_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "--policy", "snapkv", "--task", "trec", "--model", "mistral")
    assert "d2o, Table 18" in text
    assert "d2o, Table 21" in text
    assert "60.62" in text
    assert "54.79" not in text  # SirLLM's


def test_a_group_stands_for_its_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(out(capsys, "criticalkv", "1", "--task", "ruler", "--json"))
    assert len(rows) == 315
    rows = json.loads(out(capsys, "--task", "longbench_code", "--policy", "d2o", "--json"))
    assert {row["task"] for row in rows} == {"longbench_lcc", "longbench_repobench-p"}


def test_figures_are_printed_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = list(csv.DictReader(io.StringIO(out(capsys, "--csv"))))
    assert tuple(lines[0]) == FIELDS
    assert len(lines) == len(list(all_figures()))
    (row,) = json.loads(out(capsys, "trimkv", "3", "--policy", "full", "--json"))
    assert (row["value"], row["task"], row["metric"]) == ("49.4", "longmemeval_s", "accuracy")


def test_the_check_names_table_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "dbtrimkv", "--check")
    assert "51.67" in text
    assert "2 contradictions" in text.splitlines()[-1]


def test_filters_that_leave_nothing_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "trimkv", "--policy", "locret", "--task", "aime24")
    assert text.splitlines() == ["no result matches all of these names"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["critcalkv"], "unknown paper 'critcalkv'; did you mean criticalkv?"),
        (["d2o", "22"], "d2o has no table '22' with figures; there are 1, 2, 3"),
        (["--policy", "snapk"], "unknown policy 'snapk'; did you mean snapkv"),
        (["trimkv", "--task", "aim24"], "unknown task 'aim24'; did you mean aime24"),
        (["--model", "lama2-7b"], "unknown model 'lama2-7b'; did you mean Llama-2-7B"),
        (["--csv", "--json"], "--check, --csv and --json exclude each other; give only one"),
        (["--check", "--policy", "h2o"], "--check takes no filter: it needs whole tables"),
        (["d2o", "3", "--check"], "--check takes no table: it compares the tables of a paper"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["published", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvbench: {message}")
    assert captured.err.count("\n") == 1


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """The folder of a made-up run of snapkv at 0.4 on vt."""
    return write_run(make_run(policies=["snapkv"], budgets=["0.4"], tasks=["vt"], samples=8), tmp_path / "run")


def test_a_report_lays_published_scores_beside_ours(made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["report", str(made_up), "--with-published"]) == 0
    text = capsys.readouterr().out
    assert "compared with published scores" in text
    assert "Qwen2.5-32B" in text
    folder = made_up / "report"
    tables = [f"tables/published{layout}.{form}" for layout in ("", "-criticalkv-1") for form in ("csv", "tex")]
    for name in ("published.md", *tables):
        assert f"wrote {folder / name}" in text
        assert (folder / name).is_file()
    assert "| published | 96.60 |" in (folder / "published.md").read_text()
    assert call(["report", str(made_up), "--with-published", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["published"]
    assert [row["published"] for row in rows] == pytest.approx([0.966, 0.748, 0.998])


def test_a_report_without_the_flag_has_no_published_scores(made_up: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["report", str(made_up), "--json"]) == 0
    assert "published" not in json.loads(capsys.readouterr().out)
    assert not (made_up / "report" / "published.md").exists()


def test_a_report_that_nothing_published_fits_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells, samples = make_run(policies=["snapkv"], budgets=["0.1"], tasks=["vt"], samples=8)
    monkeypatch.setattr(load, "load_frames", lambda *_, **__: (cells, samples))
    assert call(["report", str(tmp_path), "--with-published"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (one for one in lines if one.startswith("no published result matches"))
    assert line in (tmp_path / "report" / "published.md").read_text()
