"""Ranks, marks and notes of a filled table."""

from __future__ import annotations

import csv as csv_module
import io
import math

import pytest

from kvbench.errors import UserError
from kvbench.papers.layouts.fill import fill
from kvbench.papers.layouts.measures import Measures
from kvbench.papers.layouts.pivot import Axes, pivot
from kvbench.papers.layouts.value import Value
from kvbench.regression import significance
from kvbench.report.frames import prepare
from kvbench.tables.outputs import csv, plain_text
from kvbench.tables.table import Graded, Table

from ...report.conftest import Frames, make_run
from .conftest import measures_of, together

BY_POLICY = Axes(("policy",), ("task",))


def filled(frames: Frames, axes: Axes = BY_POLICY, against: str = "") -> Table:
    measures = measures_of(frames)
    return fill(pivot(measures, axes), measures, against)


def column(table: Table, j: int) -> list[Graded]:
    cells = [row.cells[j] for row in table.rows]
    assert all(isinstance(cell, Graded) for cell in cells)
    return cells  # type: ignore[return-value]


def scored(scores: dict[str, float], higher: bool = True) -> Frames:
    """One task with these scores; the full cache has 0.9."""
    cells, samples = make_run(list(scores), ["0.2"], ["vt"], samples=10)
    cells["score"] = [0.9, *scores.values()]
    return cells.assign(higher_is_better=higher), samples


def notes(table: Table) -> str:
    return "\n".join(map(plain_text, table.notes))


def test_the_best_and_the_second_best_are_ranked_without_the_full_cache() -> None:
    table = filled(scored({"a": 0.5, "b": 0.8, "c": 0.6}))
    assert [cell.rank for cell in column(table, 1)] == [0, 0, 1, 2]
    assert "Bold: best; underlined: second best" in notes(table)


def test_ties_share_their_rank() -> None:
    # 0.8001 reads the same as 0.8.
    table = filled(scored({"a": 0.8, "b": 0.8001, "c": 0.6, "d": 0.6}))
    assert [cell.rank for cell in column(table, 1)] == [0, 1, 1, 2, 2]


def test_less_is_better_where_the_task_says_so() -> None:
    table = filled(scored({"a": 0.5, "b": 0.8, "c": 0.6}, higher=False))
    assert [cell.rank for cell in column(table, 1)] == [0, 1, 0, 2]


def test_one_policy_alone_is_not_the_best() -> None:
    table = filled(scored({"a": 0.5}))
    assert [cell.rank for cell in column(table, 1)] == [0, 0]
    assert "Bold" not in notes(table)


def test_policies_compete_at_one_budget_whatever_the_axes() -> None:
    frames = make_run(["snapkv", "criticalkv", "random"], ("0.1", "0.2"), ["vt"])
    down = filled(frames, Axes(("policy",), ("budget",)))
    across = filled(frames, Axes(("budget",), ("policy",)))
    ranks = [[cell.rank for cell in column(down, j)] for j in (1, 2)]
    assert ranks == [[0, 2, 1, 0], [0, 2, 1, 0]]
    assert [[c.rank for c in row.cells[1:] if isinstance(c, Graded)] for row in across.rows] == ranks


def test_bytes_held_are_not_ranked() -> None:
    table = filled(make_run(budgets=["0.2"]), Axes(("policy",), ("task",), Value.KV))
    assert {cell.rank for cell in column(table, 1)} == {0}


def test_bytes_held_over_tasks_are_those_of_a_report() -> None:
    cells, samples = make_run(["snapkv"], ["0.2"], ("vt", "cwe"), samples=10)
    longer = cells["task"] == "cwe"
    cells.loc[longer, "kv_bytes_full"] *= 9
    cells.loc[longer, "kv_bytes_live"] *= 3
    table = filled((cells, samples), Axes(("policy",), ("budget",), Value.KV))
    row = prepare(cells, samples).overall.set_index("policy").loc["snapkv"]
    assert column(table, 1)[1].value == pytest.approx(row["share"]) == pytest.approx(0.204 * 4 / 10)


def by_hand(measures: Measures, pairs: list[tuple[str, str]], against: str) -> list[float]:
    """Corrected p-values of policies against one of them, task by task, from the samples."""
    parts = {cell: measures._samples.of([cell]) for cell in measures.cells["cell"]}
    answers = {c: dict(zip(p["sample_id"], p["score"], strict=True)) for c, p in parts.items()}
    contexts = dict(pair for part in parts.values() for pair in zip(part["sample_id"], part["context_id"], strict=True))
    cells = {(row.policy, row.task): row.cell for row in measures.cells.itertuples()}
    return significance.holm(
        [
            significance.paired_p(answers[cells[policy, task]], answers[cells[against, task]], contexts)
            for policy, task in pairs
        ]
    )


@pytest.mark.parametrize("against", ["full", "snapkv"])
def test_marks_are_holms_over_the_table(against: str) -> None:
    frames = make_run(["random", "snapkv", "criticalkv"], ["0.1"], samples=30)
    measures = measures_of(frames)
    table = fill(pivot(measures, BY_POLICY), measures, against)
    tested = [p for p in ("random", "snapkv", "criticalkv") if p != against]
    pairs = [(policy, task) for policy in tested for task in ("vt", "cwe")]
    want = dict(zip(pairs, by_hand(measures, pairs, against), strict=True))
    policies = ["full", "random", "snapkv", "criticalkv"]
    marked = set()
    for j, task in enumerate(("vt", "cwe"), 1):
        for policy, cell in zip(policies, column(table, j), strict=True):
            if (policy, task) not in want:
                assert cell.better == 0
                assert math.isnan(cell.p)
                continue
            p = want[policy, task]
            assert cell.p == pytest.approx(p)
            base = column(table, j)[policies.index(against)].value
            sign = 1 if cell.value > base else -1
            assert cell.better == (sign if p < 0.05 else 0)
            marked.add(cell.better)
    assert -1 in marked
    assert len(marked) > 1


def test_the_note_says_what_marks_mean() -> None:
    table = filled(make_run(["random", "snapkv"], ["0.1"], samples=30), against="snapkv")
    text = notes(table)
    assert "significantly better or worse than snapkv at the same budget" in text
    assert "p < 0.05 after Holm's correction for the 2 tests of this table)" in text
    assert "30 samples per task, 1024 tokens, compressed at the moment context, seed 0." in text
    assert "No mark is possible" not in text


def test_too_few_contexts_for_any_mark_are_named() -> None:
    table = filled(make_run(["random", "snapkv"], ["0.1"], samples=6), against="full")
    assert {cell.better for cell in column(table, 1)} == {0}
    assert "No mark is possible with 6 contexts: at least 8 would have to differ." in notes(table)


def test_scores_that_are_the_same_are_not_tested() -> None:
    cells, samples = make_run(["snapkv"], ["0.2"], ["vt"], samples=10)
    samples["score"] = 1.0
    table = filled((cells, samples), against="full")
    assert math.isnan(column(table, 1)[1].p)
    assert "significantly" not in notes(table)


def test_where_less_is_better_a_lower_score_is_marked_as_better() -> None:
    cells, samples = make_run(["random"], ["0.1"], ["vt"], samples=30)
    table = filled((cells.assign(higher_is_better=False), samples), against="full")
    assert column(table, 1)[1].better == 1


def test_a_loss_is_tested_unless_its_score_stands_beside_it() -> None:
    frames = make_run(["random"], ["0.1"], ["vt"], samples=30)
    alone = filled(frames, Axes(("policy",), ("task",), Value.LOSS), "full")
    assert column(alone, 1)[1].better == -1
    beside = filled(frames, Axes(("policy",), ("task",), mean=True), "full")
    assert [column(beside, j)[1].better for j in (1, 2, 3)] == [-1, -1, 0]
    assert "for the 1 test of" in notes(alone)


def test_a_policy_that_was_not_run_cannot_be_tested_against() -> None:
    with pytest.raises(UserError, match=r"--against snapkw: not in the run; did you mean snapkv"):
        filled(make_run(budgets=["0.2"], samples=6), against="snapkw")


def test_csv_has_corrected_p_values_and_plain_scores() -> None:
    table = filled(make_run(["random", "snapkv"], ["0.1"], samples=30), against="full")
    rows = list(csv_module.DictReader(io.StringIO(csv(table))))
    assert float(rows[1]["vt"]) == column(table, 1)[1].value
    assert float(rows[1]["vt_p"]) == column(table, 1)[1].p < 0.05
    assert rows[0]["vt_p"] == ""


def test_what_is_missing_is_a_dash_and_named() -> None:
    two = make_run(["adakv"], ["0.1"], ["vt"], samples=6)
    table = filled(
        together(make_run(samples=6, failed=[("snapkv", "0.2", "cwe")]), two),
        Axes(("policy", "budget"), ("task",)),
    )
    assert [row.cells[3] for row in table.rows if row.cells[3] is None] == [None, None]
    text = notes(table)
    assert "–: not in the run: adakv at 0.1" in text
    assert "–: failed: snapkv at 0.2 on cwe." in text


def test_tasks_that_tell_nothing_are_named() -> None:
    text = notes(filled(make_run(budgets=["0.2"], tasks=["vt", "qa_1"])))
    assert "The full cache is not above chance on qa_1: differences there are meaningless." in text
    assert "kvbench's own tiny model" in text


def test_informed_policies_are_marked_and_not_ranked() -> None:
    table = filled(scored({"a": 0.5, "b": 0.8, "oracle": 1.0}))
    assert [cell.rank for cell in column(table, 1)] == [0, 2, 1, 0]
    assert [plain_text(row.cells[0]) for row in table.rows] == ["full", "a", "b", "oracle (informed)"]
    assert "(informed): the policy sees question and answer. It is a reference and is not ranked." in notes(table)
    assert "(informed)" not in notes(filled(scored({"a": 0.5, "b": 0.8})))
    measures = measures_of(scored({"a": 0.5, "oracle": 1.0}))
    layout = pivot(measures, Axes(("task",), ("policy", "budget")), {"oracle": "Oracle"})
    assert fill(layout, measures).columns[-1].group == "Oracle (informed)"


def test_kl_is_named_and_neither_tested_against_the_full_cache_nor_a_loss() -> None:
    cells, samples = make_run(["random", "snapkv"], ["0.1"], samples=30)
    frames = cells.assign(metric="kl", higher_is_better=False), samples
    table = filled(frames, Axes(("policy",), ("task",), mean=True), against="full")
    assert plain_text(table.title).startswith("Scores: KL, nats (lower is better), model reference")
    assert plain_text(table.columns[-1].title) == "mean of 2"
    assert {cell.better for cell in column(table, 1)} == {0} and "significantly" not in notes(table)
    assert "significantly" in notes(filled(frames, against="snapkv"))
    for value in (Value.RELATIVE, Value.LOSS):
        with pytest.raises(UserError, match=f"--value {value}: kl compares with the full cache already"):
            filled(frames, Axes(("policy",), ("task",), value))
