from __future__ import annotations

import csv
import math
from pathlib import Path

import pandas as pd
import pytest

from kvbench.harness.catalogue import benchmarks
from kvbench.papers.published.beside import (
    MOMENTS,
    PublishedPair,
    as_records,
    beside_table,
    pairs,
    unmatched,
    write,
)
from kvbench.papers.published.results import all_figures
from kvbench.tables.outputs import markdown

from ...report.conftest import make_run

RULER = tuple(benchmarks()[0]["ruler"].leaves)


def run(**settings: object) -> pd.DataFrame:
    cells, _ = make_run(samples=8, **{"policies": ["snapkv"], "budgets": ["0.4"], **settings})  # type: ignore[arg-type]
    return cells


def only(found: list[PublishedPair], model: str) -> PublishedPair:
    (one,) = (p for p in found if p.figure.model == model)
    return one


def test_a_score_is_paired_by_policy_task_and_budget() -> None:
    cells = run(policies=["snapkv", "random"], budgets=["0.2", "0.4"], tasks=["vt"])
    found = pairs(cells)
    assert {(p.policy, p.task, p.budget) for p in found} == {("snapkv", "vt", "0.4")}
    assert len(found) == 3  # one for each model of the table
    one = only(found, "Mistral-7B-Instruct-v0.3")
    ours = cells[(cells["policy"] == "snapkv") & (cells["budget"] == "0.4")].iloc[0]
    assert (one.score, one.full_score) == (ours["score"], ours["full_score"])
    assert (one.published, one.published_full) == (pytest.approx(0.748), pytest.approx(0.906))


def test_budgets_in_tokens_are_paired_with_tokens() -> None:
    found = pairs(run(tasks=["longmemeval_s"], group="longmemeval", budgets=["4096", "8192"]))
    assert [(p.budget, p.figure.table, p.figure.value) for p in found] == [
        ("4096", "3", "13.4"),
        ("4096", "7", "13.8"),
        ("8192", "7", "15.8"),
    ]
    assert {p.published_full for p in found} == {0.494}


def test_what_several_tables_print_alike_is_there_once() -> None:
    tasks = tuple(benchmarks()[0]["longbench"].leaves)
    found = pairs(run(tasks=tasks, group="longbench", policies=["criticalkv"], full_level=1.0))
    means = [p for p in found if p.task == "longbench" and p.figure.model.startswith("Llama")]
    # Tables 2, 3 and 14 are three measurements of two settings; Table 10 contradicts Table 2.
    assert [(p.figure.table, p.figure.value) for p in means] == [
        ("2", "48.00"), ("10", "47.79"), ("14", "49.33"),
    ]  # fmt: skip
    domains = {p.task for p in found if p.figure.table == "2"}
    assert {"longbench_code", "longbench_few_shot", "longbench"} <= domains


CODE = ("longbench_lcc", "longbench_repobench-p")


def test_the_mean_of_a_set_needs_all_of_its_tasks() -> None:
    cells = run(tasks=CODE, group="longbench")
    mean = [p for p in pairs(cells) if p.task == "longbench_code" and p.figure.table == "2"]
    assert {p.figure.value for p in mean} == {"60.49", "63.41", "44.89"}
    own = cells.loc[cells["policy"] == "snapkv", "score"]
    assert mean[0].score == pytest.approx(own.mean())
    part = pairs(run(tasks=CODE[:1], group="longbench"))
    assert "longbench_code" not in {p.task for p in part}


def test_a_mean_that_leaves_a_task_out_is_not_paired() -> None:
    found = pairs(run(tasks=RULER))  # the made-up full cache is not above chance on qa_1
    assert {p.task for p in found} == {*RULER}


def test_scores_that_do_not_run_from_0_to_1_are_not_paired() -> None:
    cells = run(tasks=["vt"])
    cells["score"] *= 7
    assert pairs(cells) == []


def test_another_model_and_moment_are_labelled() -> None:
    other, same = run(tasks=["vt"]), run(tasks=["vt"], model="meta-llama/Llama-3.1-8B-Instruct/")
    assert [p.same_model for p in pairs(other)] == [False] * 3
    assert [p.published_for for p in pairs(same)] == [
        "Llama-3.1-8B-Instruct (same model)",
        "Mistral-7B-Instruct-v0.3",
        "Qwen2.5-32B",
    ]
    later = pairs(run(tasks=["vt"], moments=["question"]))
    assert {p.setting for p in later} == {"question-agnostic (another moment)"}
    assert {p.setting for p in pairs(other)} == {"question-agnostic"}
    text = markdown(beside_table(pairs(other)))
    assert "are for other models (unless a row" in text
    assert "Setting of the published scores: question-agnostic." in text


def test_the_table_shows_scores_difference_and_shares_of_full() -> None:
    found = pairs(run(tasks=["vt"]))
    table = beside_table(found)
    assert [column.title for column in table.columns] == [
        "task", "policy", "published for", "ours", "published", "difference",
        "ours, of full", "published, of full", "printed in",
    ]  # fmt: skip
    cells = table.rows[0].cells
    one = found[0]
    assert cells[3:6] == (one.score, 0.966, pytest.approx(one.score - 0.966))
    assert cells[6:8] == (pytest.approx(one.score / one.full_score), pytest.approx(96.6 / 99.4))


def test_what_varies_has_a_column() -> None:
    cells = pd.concat([run(tasks=["vt"]), run(tasks=["vt"], lengths=[2048])])
    titles = [column.title for column in beside_table(pairs(cells)).columns]
    assert titles[:3] == ["task", "length", "policy"]


def test_without_full_the_share_is_unknown() -> None:
    (row, *_) = as_records(pairs(run(tasks=["vt"], with_full=False)))
    assert row["full_score"] is None
    assert row["published_full"] == pytest.approx(0.994)
    assert math.isclose(row["diff"], row["score"] - row["published"])


def test_a_line_says_what_the_run_has_and_what_there_is() -> None:
    line = unmatched(run(tasks=["vt"], budgets=["0.1"]))
    assert line.startswith("no published result matches: the run has snapkv at 0.1 on vt; published for")
    assert "adakv, criticalkv, headkv" in line
    assert "at 0.4 (criticalkv Table 1)" in line
    assert "\n" not in line
    assert unmatched(run(tasks=["mine"], group="mine")).endswith("; no paper has these tasks")


def test_files_are_written_beside_the_report(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    found = pairs(run(tasks=["vt"]))
    paths = write(found, "", tmp_path, {})
    names = ["published.md", "tables/published.csv", "tables/published.tex"]
    assert [str(p.relative_to(tmp_path)) for p in paths] == names
    rows = list(csv.DictReader(paths[1].read_text().splitlines()))
    assert [float(row["published"]) for row in rows] == pytest.approx([0.966, 0.748, 0.998])
    (page,) = write([], "nothing *fits*", tmp_path, {})
    assert page.read_text() == "# Published scores\n\nnothing &#42;fits&#42;\n"


def test_every_published_setting_of_a_moment_is_known() -> None:
    scored = {f.setting for f in all_figures() if f.task and f.policy and f.kept != "full"}
    rest = scored - {*MOMENTS, ""}
    # A length, a number of image tokens, or a device's batch.
    assert all(s[0].isdigit() or s[0] == "L" or "8k" in s or "128K" in s for s in rest)
