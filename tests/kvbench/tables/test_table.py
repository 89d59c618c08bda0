"""The table as a value: ranks, differences for the worse, and columns side by side."""

from __future__ import annotations

import math

import pytest

from kvbench.tables.numbers import NumberFormat, interval, number, percent, size
from kvbench.tables.table import Column, Compared, Interval, Table, TableRow, beside

NAN = math.nan


def ranks(column: Column, cells: list, groups: str | None = None) -> dict[int, int]:
    """Ranks by row of a table of one column."""
    named = groups or "g" * len(cells)
    rows = tuple(TableRow((c,), "" if g == " " else g) for c, g in zip(cells, named, strict=True))
    return {i: rank for (i, _), rank in Table("", (column,), rows).ranks().items()}


def test_the_best_and_second_best_number_of_each_group_are_ranked() -> None:
    points = Column("score", NumberFormat.POINTS, better="higher")
    assert ranks(points, [0.1, 0.3, 0.2, 0.4, 0.5], "aaabb") == {1: 1, 2: 2, 3: 2, 4: 1}
    assert ranks(points, [0.9, 0.3, 0.2], " aa") == {1: 1, 2: 2}, "full competes with none"
    low = Column("nll", NumberFormat.NUMBER, better="lower")
    assert ranks(low, [3.0, 1.0, 2.0]) == {1: 1, 2: 2}


def test_numbers_that_read_the_same_share_a_rank() -> None:
    points = Column("score", NumberFormat.POINTS, better="higher")
    assert ranks(points, [0.50001, 0.5, 0.4, 0.39999, 0.3]) == {0: 1, 1: 1, 2: 2, 3: 2}


def test_what_has_no_number_has_no_rank() -> None:
    points = Column("score", NumberFormat.POINTS, better="higher")
    cells = [None, "failed", NAN, Interval(0.2), Compared(0.3, Interval(-0.1)), 0.1]
    assert ranks(points, cells) == {4: 1, 3: 2}
    assert ranks(points, [0.2, "failed"]) == {}, "one number alone has nothing to beat"


def test_columns_without_a_direction_and_differences_are_not_ranked() -> None:
    assert ranks(Column("bytes", NumberFormat.BYTES), [1.0, 2.0]) == {}
    assert ranks(Column("gap", NumberFormat.POINTS, better="higher", signed=True), [0.1, 0.2]) == {}


def test_a_difference_is_worse_if_all_of_its_interval_is() -> None:
    gap = Column("gap", NumberFormat.POINTS, better="higher", signed=True)
    assert gap.is_worse(Interval(-0.2, -0.3, -0.1))
    assert not gap.is_worse(Interval(-0.2, -0.3, 0.1))
    assert not gap.is_worse(Interval(-0.2))
    less = Column("gap", NumberFormat.NUMBER, better="lower", signed=True)
    assert less.is_worse(Interval(0.2, 0.1, 0.3))
    assert not less.is_worse(Interval(-0.2, -0.3, -0.1))
    assert not Column("score", NumberFormat.POINTS, better="higher").is_worse(Interval(-0.2, -0.3, -0.1))


def test_columns_stand_side_by_side() -> None:
    made = beside("t", [(Column("a"), ["x", "y"]), (Column("b"), [1, None])], groups=["p", "q"])
    assert made.rows == (TableRow(("x", 1), "p"), TableRow(("y", None), "q"))
    with pytest.raises(ValueError, match="shorter"):
        beside("t", [(Column("a"), ["x", "y"]), (Column("b"), [1])])


def test_neighbouring_columns_of_a_group_share_a_heading() -> None:
    heads = [Column("p"), Column("1", group="g"), Column("2", group="g"), Column("1", group="h")]
    assert Table("", tuple(heads), ()).column_groups == [("", 1), ("g", 2), ("h", 1)]


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.98765, NumberFormat.POINTS, "98.8"),
        (-0.0001, NumberFormat.POINTS, "0.0"),
        (-0.03, NumberFormat.POINTS, "−3.0"),
        (12.3456, NumberFormat.NUMBER, "12.35"),
        (0.68, NumberFormat.NUMBER, "0.6800"),
        (99.996, NumberFormat.NUMBER, "100.0"),
        (12345.6, NumberFormat.NUMBER, "12350"),
        (-3e-5, NumberFormat.NUMBER, "−3e-05"),
        (0.0, NumberFormat.NUMBER, "0"),
        (0.1286, NumberFormat.PERCENT, "12.9%"),
        (0.9996, NumberFormat.PERCENT, "100%"),
        (-0.2, NumberFormat.PERCENT, "−20.0%"),
        (46.0, NumberFormat.COUNT, "46"),
        (46.25, NumberFormat.COUNT, "46.3"),
        (0.2425, NumberFormat.POINTS, "24.3"),
        (math.fsum([0.97, 0.88, 0.6, 0.9]) / 4, NumberFormat.POINTS, "83.8"),
        ((0.97 + 0.88 + 0.6 + 0.9) / 4 - 2e-16, NumberFormat.POINTS, "83.8"),
        (-0.0825, NumberFormat.POINTS, "−8.3"),
        (0.62249, NumberFormat.POINTS, "62.2"),
        (0.1225, NumberFormat.PERCENT, "12.3%"),
        (0.8125, NumberFormat.RATING, "8.13"),
        (1.125, NumberFormat.TIMES, "1.13×"),
        (2.777, NumberFormat.TIMES, "2.78×"),
        (2.98e-8, NumberFormat.P_VALUE, "<0.001"),
        (0.15625, NumberFormat.P_VALUE, "0.16"),
        (1.0, NumberFormat.P_VALUE, "1"),
        (math.nan, NumberFormat.POINTS, "–"),
        (math.inf, NumberFormat.TIMES, "∞"),
        (-math.inf, NumberFormat.NUMBER, "−∞"),
    ],
)
def test_numbers_as_text(value: float, kind: NumberFormat, text: str) -> None:
    assert number(value, kind) == text


def test_signs_and_intervals_as_text() -> None:
    assert number(0.03, NumberFormat.POINTS, signed=True) == "+3.0"
    assert number(0.0001, NumberFormat.POINTS, signed=True) == "0.0", "no sign before what reads zero"
    assert interval(-0.06, 0.004, NumberFormat.POINTS, signed=True) == "[−6.0, +0.4]"
    assert interval(0.2, 0.8, NumberFormat.PERCENT) == "[20.0, 80.0]", "the mean has the percent sign"
    assert interval(-math.inf, math.inf, NumberFormat.NUMBER) == "[−∞, ∞]"
    assert interval(math.nan, 1.0, NumberFormat.NUMBER) == "–"
    assert percent(0.2) == "20.0%"
    sizes = [size(v) for v in (512, 2048, 15_000, 5 * 2**20)]
    assert sizes == ["512 B", "2.00 KiB", "14.6 KiB", "5.00 MiB"]
