from __future__ import annotations

import pytest

from kvbench.errors import UserError
from kvbench.papers.layouts.fill import fill
from kvbench.papers.layouts.pivot import Axes, default_rows, pivot
from kvbench.papers.layouts.value import Value
from kvbench.tables.outputs import csv, markdown
from kvbench.tables.table import Graded, Name, Table

from ...report.conftest import make_run, unaveraged
from .conftest import measures_of, together

MOMENTS = ("context", "question")


def made(axes: Axes, **settings: object) -> Table:
    measures = measures_of(make_run(**{"samples": 10, **settings}))  # type: ignore[arg-type]
    return fill(pivot(measures, axes), measures)


def lead(table: Table, columns: int) -> list[tuple[str, ...]]:
    rows = (row.cells[:columns] for row in table.rows)
    return [tuple(c.text if isinstance(c, Name) else str(c) for c in row) for row in rows]


def test_rows_and_columns_are_what_the_run_has() -> None:
    table = made(Axes(("policy", "budget"), ("task",)), budgets=("0.4", "64", "0.1"))
    budgets = ("0.1", "0.4", "64")
    want = [(policy, b) for policy in ("snapkv", "criticalkv") for b in budgets]
    assert lead(table, 2) == [("full", "full"), *want]
    assert [c.title for c in table.columns[2:]] == [(Name("vt"), ""), (Name("cwe"), "")]


@pytest.mark.parametrize(
    ("rows", "want"),
    [
        (("policy", "moment"), [("full", ""), ("snapkv", "context"), ("snapkv", "question")]),
        (("moment", "policy"), [("", "full"), ("context", "snapkv"), ("question", "snapkv")]),
        (("moment",), [("context",), ("question",)]),
    ],
)
def test_the_full_cache_has_a_row_outside_the_moments(rows: tuple[str, ...], want: list[tuple[str, ...]]) -> None:
    table = made(Axes(rows, ("task",)), policies=["snapkv"], budgets=["0.2"], moments=MOMENTS)
    assert lead(table, len(rows)) == want


def test_the_full_cache_fills_its_row_at_every_budget() -> None:
    table = made(Axes(("policy",), ("task", "budget")))
    full = [cell.value for cell in table.rows[0].cells[1:] if isinstance(cell, Graded)]
    assert len(full) == 6
    assert len(set(full[:3])) == len(set(full[3:])) == 1
    assert [column.group for column in table.columns[1:]] == ["vt"] * 3 + ["cwe"] * 3


def test_policies_are_shown_as_the_user_says() -> None:
    measures = measures_of(make_run(samples=10))
    layout = pivot(measures, Axes(("policy", "budget"), ("task",)), {"snapkv": "Snap", "full": "Full"})
    table = fill(layout, measures, "snapkv")
    assert list(dict.fromkeys(row.cells[0] for row in table.rows)) == ["Full", "Snap", Name("criticalkv")]
    assert table.rows[0].cells[1] == Name("full")  # a budget is not a policy
    assert "worse than Snap at the same budget" in markdown(table)


def test_tasks_on_no_axis_are_averaged() -> None:
    cells, samples = make_run(tasks=("vt", "cwe", "fwe"), samples=10)
    measures = measures_of((cells, samples))
    table = fill(pivot(measures, Axes(("policy",), ("budget",))), measures)
    snap = cells[(cells["policy"] == "snapkv") & (cells["budget"] == "0.2")]
    cell = table.rows[1].cells[2]
    assert isinstance(cell, Graded)
    assert cell.value == pytest.approx(snap["score"].mean())
    assert "mean of 3 tasks" in markdown(table)


def test_groups_are_means_of_their_own_tasks() -> None:
    measures = measures_of(together(make_run(samples=10), make_run(tasks=["longbench_lcc"], group="longbench")))
    table = fill(pivot(measures, Axes(("policy", "budget"), ("group",))), measures)
    vt, cwe = (measures.cells[measures.cells["task"] == t]["score"].iloc[0] for t in ("vt", "cwe"))
    first = table.rows[0].cells[2]
    assert isinstance(first, Graded)
    assert first.value == pytest.approx((vt + cwe) / 2)
    assert len(table.columns) == 4


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (Value.SCORE, lambda s, full: s),
        (Value.DIFF, lambda s, full: s - full),
        (Value.RELATIVE, lambda s, full: s / full - 1),
        (Value.LOSS, lambda s, full: 1 - s / full),
        (Value.KV, lambda s, full: 0.204),
    ],
)
def test_values(value: Value, want) -> None:  # type: ignore[no-untyped-def]
    cells, samples = make_run(["snapkv"], ["0.2"], ["vt"], samples=10)
    measures = measures_of((cells, samples))
    table = fill(pivot(measures, Axes(("policy",), ("task",), value)), measures)
    cell = table.rows[1].cells[1]
    assert isinstance(cell, Graded)
    assert cell.value == pytest.approx(want(cells["score"][1], cells["score"][0]))
    assert cell.signed == (value in (Value.DIFF, Value.RELATIVE))


def test_domains_are_means_of_their_tasks_in_a_benchmark() -> None:
    tasks = ["longbench_lcc", "longbench_repobench-p", "longbench_trec", "vt"]
    cells, samples = make_run(["snapkv"], ["0.2"], tasks, group="longbench")
    cells.loc[cells["task"] == "vt", "group"] = "my_own"
    table = fill(
        pivot(measures_of((cells, samples)), Axes(("policy",), ("domain",), mean=True)), measures_of((cells, samples))
    )
    by_task = cells[cells["policy"] == "snapkv"].set_index("task")["score"]
    (row,) = (row for row in table.rows if Name("snapkv") in row.cells)
    shown = {
        column.title[0].text if isinstance(column.title, tuple) else column.title: cell.value
        for column, cell in zip(table.columns, row.cells, strict=True)
        if isinstance(cell, Graded)
    }
    code = (by_task["longbench_lcc"] + by_task["longbench_repobench-p"]) / 2
    assert shown["longbench_code"] == pytest.approx(code)
    assert shown["longbench_few_shot"] == pytest.approx(by_task["longbench_trec"])
    assert shown["mean of 4"] == pytest.approx(by_task[tasks].mean()), "every task counts once"
    assert len(shown) == 5


def test_the_mean_stands_beside_its_loss() -> None:
    cells, samples = make_run(["snapkv"], ["0.2"], samples=10)
    measures = measures_of((cells, samples))
    table = fill(pivot(measures, Axes(("policy", "budget"), ("task",), mean=True)), measures)
    means = cells.groupby("policy", sort=False)["score"].mean()
    mean, loss = table.rows[1].cells[4:]
    assert isinstance(mean, Graded)
    assert isinstance(loss, Graded)
    assert mean.value == pytest.approx(means["snapkv"])
    assert loss.value == pytest.approx(1 - means["snapkv"] / means["full"])


def test_a_dimension_on_no_axis_must_have_one_value() -> None:
    with pytest.raises(UserError, match=r"several values of budget: 0.1, 0.2, 0.4; put budget in"):
        made(Axes(("policy",), ("task",)))
    with pytest.raises(UserError, match=r"choose one with --moment"):
        made(Axes(("policy", "budget"), ("task",)), moments=MOMENTS)


@pytest.mark.parametrize(
    ("rows", "columns", "more", "message"),
    [
        (("polcy",), ("task",), {}, "unknown dimension 'polcy'; did you mean policy"),
        (("policy",), ("policy",), {}, "policy is given twice"),
        ((), ("task",), {}, "need at least one dimension each"),
        (("task",), ("policy",), {"mean": True}, "--mean needs --columns task"),
        (("policy",), ("task",), {"mean": True, "value": Value.KV}, "--mean needs --value score"),
    ],
)
def test_wrong_axes(rows: tuple[str, ...], columns: tuple[str, ...], more, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=message):
        Axes(rows, columns, **more)


def test_tasks_of_natural_length_stand_beside_others() -> None:
    natural = make_run(tasks=["longbench_lcc"], group="longbench", lengths=(0,), samples=10)
    measures = measures_of(together(make_run(samples=10), natural))
    table = fill(pivot(measures, Axes(("policy", "budget"), ("task",))), measures)
    assert all(isinstance(cell, Graded) for row in table.rows for cell in row.cells[2:])
    assert "1024 tokens" in markdown(table)


def test_a_mean_of_unlike_scores_is_a_dash() -> None:
    cells, samples = make_run(samples=10)
    cells.loc[cells["task"] == "cwe", ["score", "full_score"]] *= 40
    measures = measures_of((cells, samples))
    table = fill(pivot(measures, Axes(("policy", "budget"), ("task",), mean=True)), measures)
    assert all(row.cells[4] is None for row in table.rows)


def test_csv_repeats_the_names_of_sections() -> None:
    lines = csv(made(Axes(("policy", "budget"), ("task",)))).splitlines()
    assert [line.split(",")[0] for line in lines[2:]] == ["snapkv"] * 3 + ["criticalkv"] * 3


def test_by_default_whatever_varies_is_in_the_rows() -> None:
    plain = measures_of(make_run(samples=4))
    assert default_rows(plain, ("task",)) == ("policy", "budget")
    assert default_rows(plain, ("budget", "task")) == ("policy",)
    varied = measures_of(make_run(samples=4, moments=MOMENTS, lengths=(512, 1024)))
    assert default_rows(varied, ("length",)) == ("moment", "policy", "budget")


def test_means_leave_out_scores_that_are_no_means_and_say_so() -> None:
    frames = make_run(["snapkv"], ["0.2"], tasks=("vt", "cwe", "fwe"), samples=10)
    cells = frames[0]
    measures = measures_of(unaveraged(frames, "cwe"))
    for axes, column in ((Axes(("policy",), ("budget",)), 1), (Axes(("policy", "budget"), ("task",), mean=True), 5)):
        table = fill(pivot(measures, axes), measures)
        cell = table.rows[1].cells[column]
        assert isinstance(cell, Graded)
        want = cells[(cells["policy"] == "snapkv") & (cells["task"] != "cwe")]["score"].mean()
        assert cell.value == pytest.approx(want)
        assert "Means leave out cwe, whose score is not a mean over samples." in markdown(table)
    alone = fill(pivot(measures, Axes(("policy", "budget"), ("task",))), measures)
    assert "Means leave out" not in markdown(alone)
    both = measures_of(unaveraged(unaveraged(make_run(samples=10), "vt"), "cwe"))
    with pytest.raises(UserError, match="--mean needs a task"):
        pivot(both, Axes(("policy", "budget"), ("task",), mean=True))


def test_a_score_that_is_no_mean_has_a_difference_and_no_mark() -> None:
    measures = measures_of(unaveraged(make_run(["snapkv"], ["0.2"], ["vt"], samples=40), "vt"))
    for value, want in ((Value.SCORE, 5), (Value.DIFF, 2), (Value.RELATIVE, 2 / 3)):
        cell = fill(pivot(measures, Axes(("policy",), ("task",), value)), measures, "full").rows[1].cells[1]
        assert isinstance(cell, Graded)
        assert cell.value == pytest.approx(want) and not cell.better


def test_means_leave_out_tasks_on_which_full_is_not_above_chance_and_say_so() -> None:
    run = make_run(["snapkv"], ["0.2"], tasks=("vt", "cwe", "qa_1"), samples=10)  # qa_1 has a chance level of 0.99
    cells, measures = run[0], measures_of(run)
    want = cells[(cells["policy"] == "snapkv") & (cells["task"] != "qa_1")]["score"].mean()
    for axes, column in ((Axes(("policy",), ("budget",)), 1), (Axes(("policy", "budget"), ("task",), mean=True), 5)):
        table = fill(pivot(measures, axes), measures)
        cell = table.rows[1].cells[column]
        assert isinstance(cell, Graded) and cell.value == pytest.approx(want)
        assert "Means leave out qa_1: the full cache is not above chance there." in markdown(table)
    assert (
        fill(pivot(measures, Axes(("policy", "budget"), ("task",), mean=True)), measures).columns[5].title
        == "mean of 2"
    )
    none = measures_of(make_run(["snapkv"], ["0.2"], ("vt", "cwe"), samples=10, chance=0.999))
    table = fill(pivot(none, Axes(("policy",), ("budget",))), none)
    assert isinstance(table.rows[1].cells[1], Graded) and "Means leave out" not in markdown(table)
    assert "not above chance on vt, cwe: differences there are meaningless" in markdown(table)


def test_changes_are_over_the_samples_that_both_have() -> None:
    cells, samples = make_run(["snapkv"], ["0.2"], ["vt"], samples=40, full_level=0.8)
    part = samples[(samples["policy"] == "full") | (samples["doc_id"] < 10)]
    by = part[part["doc_id"] < 10].pivot(index="doc_id", columns="policy", values="score").mean()
    scores = part.groupby("policy")["score"].mean()
    counts = part.groupby("policy").size()
    cells = cells.assign(score=cells["policy"].map(scores), samples=cells["policy"].map(counts))
    assert by["full"] != scores["full"]
    measures = measures_of((cells, part))
    for value, want in (
        (Value.DIFF, by["snapkv"] - by["full"]),
        (Value.RELATIVE, by["snapkv"] / by["full"] - 1),
        (Value.LOSS, 1 - by["snapkv"] / by["full"]),
    ):
        table = fill(pivot(measures, Axes(("policy",), ("task",), value)), measures)
        cell = table.rows[1].cells[1]
        assert isinstance(cell, Graded) and cell.value == pytest.approx(want)
    assert "10 to 40 samples per task (differences and losses are over common ones)" in markdown(table)
