"""A task's scores by a field that its rows carry, in the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.report import render
from kvbench.report.frames import prepare
from kvbench.report.panel import panels
from kvbench.report.strata import MOST, strata
from kvbench.stats import paired
from kvbench.tables.table import Compared, Interval, Name, Table

from .conftest import unaveraged


def tables(cells: Any, samples: Any) -> list[Table]:
    results = prepare(cells, samples)
    (panel,) = panels(results)
    return [table for _, _, table in strata(panel, results.samples)]


def marked(samples: Any, mark: Any) -> Any:
    return samples.assign(extra=[json.dumps(mark(i)) for i in samples["doc_id"]])


def test_scores_by_a_field_and_their_paired_differences(run_frames: Any, tmp_path: Path) -> None:
    cells, samples = run_frames(["snapkv"], ("0.1", "0.4"), ["vt"], samples=30)
    samples = marked(samples, lambda i: {"kind": "easy" if i % 3 else "ha|rd", "depth": i % 4})
    (table,) = tables(cells, samples)
    assert table.title[:3] == (Name("vt"), " by ", Name("kind"))
    assert [column.title for column in table.columns[2:]] == [
        (Name("easy"), " (20)"),
        (Name("ha|rd"), " (10)"),
    ]
    assert [row.cells[:2] for row in table.rows] == [
        (Name("full"), Name("full")),
        (Name("snapkv"), Name("0.1")),
        (Name("snapkv"), Name("0.4")),
    ]
    for column, hard in ((2, False), (3, True)):
        part = samples[(samples["doc_id"] % 3 == 0) == hard]
        by = dict(iter(part.groupby(["policy", "budget"])))
        full = by["full", "full"].set_index("sample_id")["score"]
        assert table.rows[0].cells[column] == full.mean()
        own = by["snapkv", "0.1"].set_index("sample_id")["score"]
        clusters = part.set_index("sample_id")["context_id"].to_dict()
        gap = paired(own.to_dict(), full.to_dict(), clusters)
        want = Compared(own.mean(), Interval(gap.mean, gap.lo, gap.hi))
        assert table.rows[1].cells[column] == want
    text = render(cells, samples, tmp_path)[0].read_text()
    assert "`vt` by `kind` (questions), with the paired difference from full." in text
    assert "| policy | budget | `easy` (20) | ha&#124;rd (10) |" in text


def test_numbers_are_in_order(run_frames: Any) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=30)
    (table,) = tables(cells, marked(samples, lambda i: {"level": [10, 9, 2][i % 3]}))
    assert [column.title[0].text for column in table.columns[2:]] == ["2", "9", "10"]


@pytest.mark.parametrize(
    "mark",
    [
        lambda i: {},
        lambda i: {"kind": "one"},
        lambda i: {"id": i % (MOST + 1)},
        lambda i: {"depth": i % 2},
        lambda i: {"kind": "a"} if i % 2 else {},
    ],
)
def test_what_does_not_divide_a_task_has_no_table(run_frames: Any, mark: Any) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=30)
    assert tables(cells, marked(samples, mark)) == []


@pytest.mark.parametrize(("values", "divided"), [(2, True), (4, True), (5, False), (9, False)])
def test_what_names_rows_divides_nothing(run_frames: Any, values: int, divided: bool) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=9)
    found = tables(cells, marked(samples, lambda i: {"id": f"row-{i % values}"}))
    assert bool(found) == divided


@pytest.mark.parametrize("values", [("a", None), ([1, 2], []), ({"a": 1}, {"a": 2}), (0.5, 1), (True, "True ")])
def test_values_of_any_kind_divide(run_frames: Any, values: tuple[Any, Any]) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=8)
    (table,) = tables(cells, marked(samples, lambda i: {"kind": values[i % 2]}))
    assert [column.title[1] for column in table.columns[2:]] == [" (4)", " (4)"]


def test_a_failed_cell_and_a_run_without_full(run_frames: Any) -> None:
    cells, samples = run_frames(
        ["snapkv", "random"], ("0.2",), ["vt"], with_full=False, failed=[("random", "0.2", "vt")]
    )
    (table,) = tables(cells, marked(samples, lambda i: {"kind": i % 2}))
    snapkv, failed = table.rows
    assert failed.cells[2:] == ("failed", "failed")
    assert all(isinstance(cell, float) for cell in snapkv.cells[2:])


def test_a_task_that_says_nothing_is_not_divided(run_frames: Any) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=30, chance=0.995)
    assert tables(cells, marked(samples, lambda i: {"kind": i % 2})) == []


def test_a_score_that_is_no_mean_is_not_divided(run_frames: Any) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=30)
    divided = marked(samples, lambda i: {"kind": i % 2})
    assert len(tables(cells, divided)) == 1
    assert tables(*unaveraged((cells, divided), "vt")) == []
