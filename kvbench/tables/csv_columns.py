"""Conversion of a table column to CSV columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvbench.tables.table import Cell, Compared, Graded, Interval, Phrase

Values: TypeAlias = "list[float | str]"


def csv_columns(
    column_title: str, column_cells: Sequence[Cell], write_phrase: Callable[[Phrase], str]
) -> tuple[list[str], list[Values]]:
    """Convert a column to one to four CSV columns, with separate columns for intervals and p-values.

    Args:
        column_title: Title of the column.
        column_cells: Cells of the column.
        write_phrase: Converts a phrase to text.

    Returns:
        The titles of the CSV columns, and the values of each cell. Text that a spreadsheet would evaluate as a formula
        gets a leading apostrophe.
    """
    bound_suffixes = ("_lo", "_hi")
    if any(isinstance(cell, Compared) for cell in column_cells):
        suffixes: tuple[str, ...] = (
            "",
            "_diff",
            *(f"_diff{bound_suffix}" for bound_suffix in bound_suffixes),
        )
    elif any(isinstance(cell, Interval) for cell in column_cells):
        suffixes = ("", *bound_suffixes)
    elif any(isinstance(cell, Graded) and not math.isnan(cell.p) for cell in column_cells):
        suffixes = ("", "_p")
    else:
        suffixes = ("",)
    column_titles = [_formula_safe(column_title) + suffix for suffix in suffixes]
    return column_titles, [_values(cell, len(suffixes), write_phrase) for cell in column_cells]


def _values(cell: Cell, column_count: int, write_phrase: Callable[[Phrase], str]) -> Values:
    match cell:
        case Compared():
            numbers = [cell.score, cell.gap.mean, cell.gap.lo, cell.gap.hi]
        case Interval():
            numbers = [cell.mean, cell.lo, cell.hi]
        case Graded():
            numbers = [cell.value, cell.p][:column_count]
        case int() | float():
            numbers = [cell]
        case None:
            numbers = []
        case _:
            return [_formula_safe(write_phrase(cell)), *[""] * (column_count - 1)]
    cell_values: Values = ["" if math.isnan(number) else number for number in numbers]
    return cell_values + [""] * (column_count - len(cell_values))


def _formula_safe(cell_text: str) -> str:
    return f"'{cell_text}" if cell_text.startswith(("=", "+", "-", "@")) else cell_text
