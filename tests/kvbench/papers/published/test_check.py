from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbench.papers.published import claims
from kvbench.papers.published.check import check, findings_table
from kvbench.papers.published.results import Figure, Paper, PublishedTable

from .test_claims import figure, row, scores


def made(**tables: Sequence[Figure]) -> Paper:
    held = {
        number.lstrip("t"): PublishedTable(number.lstrip("t"), "", "", "", tuple(figures))
        for number, figures in tables.items()
    }
    return Paper("made", "", "", held)


def in_table(number: str, value: str, **fields: str) -> Figure:
    return figure(value, paper="made", table=number, row="SnapKV", column="VT", **fields)


def test_a_wrong_mean_is_found_and_a_right_one_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(claims.RULES, ("made", "1"), (claims.mean("mean"),))
    right = row("snapkv", *scores("1.0", "2.0"), ("mean", "score", "1.5"), table="1")
    wrong = row("adakv", *scores("1.0", "2.0"), ("mean", "score", "1.7"), table="1")
    found = check([made(t1=[*right, *wrong])])
    assert found.sums == 2
    (one,) = found.findings
    assert (one.figure, one.expected) == (wrong[-1], "1.50")
    assert "mean" in one.why


@pytest.mark.parametrize(
    ("first", "second", "findings"),
    [("1.23", "1.23", 0), ("1.23", "1.2", 0), ("1.23", "1.24", 0), ("1.23", "1.25", 1)],
)
def test_a_cell_that_two_tables_print_differently_is_found(first: str, second: str, findings: int) -> None:
    same = {"policy": "snapkv", "task": "vt", "budget": "20%", "model": "m"}
    paper = made(t1=[in_table("1", first, **same)], t2=[in_table("2", second, **same)])
    found = check([paper])
    assert (found.repeats, len(found.findings)) == (1, findings)
    for one in found.findings:
        assert (one.figure.table, one.expected) == ("2", first)
        assert "Table 1" in one.why


@pytest.mark.parametrize("field", ["policy", "task", "budget", "model", "setting", "metric"])
def test_what_differs_in_any_respect_is_another_measurement(field: str) -> None:
    same = {"policy": "snapkv", "task": "vt", "budget": "20%", "model": "m"}
    paper = made(t1=[in_table("1", "1.0", **same)], t2=[in_table("2", "9.0", **same | {field: "other"})])
    assert check([paper]).repeats == 0


def test_findings_are_a_table_in_the_order_of_the_papers_tables() -> None:
    same = {"policy": "snapkv", "task": "vt"}
    paper = made(**{f"t{n}": [in_table(n, v, **same)] for n, v in (("9", "1"), ("10", "5"), ("2", "8"))})
    table = findings_table(check([paper]))
    assert [line.cells[1] for line in table.rows] == ["2", "10"]
