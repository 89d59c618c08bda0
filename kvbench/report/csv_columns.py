"""A column of a table as columns of comma-separated values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvbench.report.table import Cell, Compared, Graded, Interval, Phrase

Values: TypeAlias = "list[float | str]"


def csv_columns(
    title: str, cells: Sequence[Cell], write: Callable[[Phrase], str]
) -> tuple[list[str], list[Values]]:
    """The one to four columns that a column becomes, for intervals and p-values have their own.

    Args:
        title: Title of the column.
        cells: Its cells.
        write: Writes a text.

    Returns:
        The titles of the columns, and for each cell its values. Text that a spreadsheet would run
        as a formula begins with an apostrophe.
    """
    ends = ("_lo", "_hi")
    if any(isinstance(cell, Compared) for cell in cells):
        suffixes: tuple[str, ...] = ("", "_diff", *(f"_diff{end}" for end in ends))
    elif any(isinstance(cell, Interval) for cell in cells):
        suffixes = ("", *ends)
    elif any(isinstance(cell, Graded) and not math.isnan(cell.p) for cell in cells):
        suffixes = ("", "_p")
    else:
        suffixes = ("",)
    titles = [_formula_safe(title) + suffix for suffix in suffixes]
    return titles, [_values(cell, len(suffixes), write) for cell in cells]


def _values(cell: Cell, count: int, write: Callable[[Phrase], str]) -> Values:
    match cell:
        case Compared():
            numbers = [cell.score, cell.gap.mean, cell.gap.lo, cell.gap.hi]
        case Interval():
            numbers = [cell.mean, cell.lo, cell.hi]
        case Graded():
            numbers = [cell.value, cell.p][:count]
        case int() | float():
            numbers = [cell]
        case None:
            numbers = []
        case _:
            return [_formula_safe(write(cell)), *[""] * (count - 1)]
    known: Values = ["" if math.isnan(x) else x for x in numbers]
    return known + [""] * (count - len(known))


def _formula_safe(text: str) -> str:
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
