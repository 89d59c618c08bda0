"""Tables as data: typed columns and cells, independent of the output format.

A `Table` is passed to an output of `kvbench.tables.outputs`: terminal, Markdown, LaTeX, HTML or CSV. The outputs escape
every text, so a table holds names and messages exactly as a user, a model or a file wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from kvbench.tables.numbers import NumberFormat, number

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Name:
    """A verbatim name, in a code font if the output has one."""

    text: str


@dataclass(frozen=True)
class Lines:
    """Phrases on separate lines."""

    lines: tuple[Phrase, ...]


Phrase: TypeAlias = "str | Name | Lines | tuple[Phrase, ...]"
"""Rich text. The parts of a tuple are joined without spaces."""


@dataclass(frozen=True)
class Interval:
    """A number with its 95% interval; the ends are NaN if it is unknown."""

    mean: float
    lo: float = math.nan
    hi: float = math.nan


@dataclass(frozen=True)
class Compared:
    """A score with its paired difference from another score."""

    score: float
    gap: Interval


@dataclass(frozen=True)
class Graded:
    """A number with its own format, rank and significance.

    Attributes:
        value: The number; NaN is written as a dash.
        kind: Format of the number.
        signed: Whether the number is a difference, written with a sign.
        rank: 1 for the best and 2 for the second best of the competing numbers, otherwise 0.
        better: +1 or -1 if significantly better or worse than a reference, otherwise 0.
        p: p-value, corrected for all tests of the table; NaN if there is none.
        digits: Number of decimals; None for those of the format.
    """

    value: float
    kind: NumberFormat
    signed: bool = False
    rank: int = 0
    better: int = 0
    p: float = math.nan
    digits: int | None = None

    @property
    def text(self) -> str:
        """The number as text, without marks."""
        return number(self.value, self.kind, signed=self.signed, digits=self.digits)


TableCell: TypeAlias = "float | int | Interval | Compared | Graded | Phrase | None"
"""Content of a table cell. None is written as a dash. Text in a number column explains a missing number."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Heading.
        kind: Format of the numbers.
        group: Heading above adjacent columns of the same group.
        better: Which numbers are better, if known.
        signed: Whether the numbers are differences, written with a sign.
        align: Alignment; by default, text is left-aligned and numbers are right-aligned.
        merged: Whether to leave a cell blank if it and all cells before it repeat the row above, as for section names.
            CSV repeats them.
        cut: Whether a terminal cuts a text that is too long for its line, instead of wrapping it.
    """

    title: Phrase
    kind: NumberFormat = NumberFormat.TEXT
    group: str = ""
    better: Literal["higher", "lower", ""] = ""
    signed: bool = False
    align: Literal["left", "right", ""] = ""
    merged: bool = False
    cut: bool = False

    @property
    def right(self) -> bool:
        """Whether the column is aligned to the right."""
        return self.align == "right" or (not self.align and self.kind is not NumberFormat.TEXT)

    def is_worse(self, cell: TableCell) -> bool:
        """Return whether the whole interval of a difference is on the worse side."""
        if not (self.signed and self.better and isinstance(cell, Interval)):
            return False
        return cell.hi < 0 if self.better == "higher" else cell.lo > 0


@dataclass(frozen=True)
class TableRow:
    """A row of a table.

    Attributes:
        cells: One cell per column.
        group: Rows that compete for the best number, such as those of one budget. A row without a group, such as the
            full cache's, does not compete.
    """

    cells: tuple[TableCell, ...]
    group: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: Title.
        columns: Columns.
        rows: Rows in order; those of one group are adjacent.
        notes: Notes below the table.
    """

    title: Phrase
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[Phrase, ...] = ()

    @property
    def column_groups(self) -> list[tuple[str, int]]:
        """Heading and width of each run of adjacent columns with the same group."""
        column_runs: list[tuple[str, int]] = []
        for column in self.columns:
            if column_runs and column_runs[-1][0] == column.group:
                column_runs[-1] = (column.group, column_runs[-1][1] + 1)
            else:
                column_runs.append((column.group, 1))
        return column_runs

    def ranks(self) -> dict[tuple[int, int], int]:
        """Return the ranks of the best (1) and second best (2) cells, by row and column.

        Numbers with equal text share a rank. A column is ranked if `better` is set and it does not hold differences; a
        group of rows is ranked if two of its rows have a number.
        """
        ranks: dict[tuple[int, int], int] = {}
        for column_index, column in enumerate(self.columns):
            if not column.better or column.signed:
                continue
            direction_sign = 1 if column.better == "lower" else -1
            for row_group in dict.fromkeys(table_row.group for table_row in self.rows if table_row.group):
                row_values = {
                    row_index: cell_value
                    for row_index, table_row in enumerate(self.rows)
                    if table_row.group == row_group
                    and not math.isnan(cell_value := value_of(table_row.cells[column_index]))
                }
                if len(row_values) < 2:
                    continue
                row_texts = {row_index: number(cell_value, column.kind) for row_index, cell_value in row_values.items()}
                row_ranks = first_two(
                    {
                        row_index: (direction_sign * row_values[row_index], row_texts[row_index])
                        for row_index in row_values
                    }
                )
                ranks |= {(row_index, column_index): row_rank for row_index, row_rank in row_ranks.items()}
        return ranks

    def repeats(self, row_index: int, column_index: int) -> bool:
        """Return whether a cell is left blank; see `Column.merged`."""
        if not row_index or not self.columns[column_index].merged:
            return False
        return self.rows[row_index - 1].cells[: column_index + 1] == self.rows[row_index].cells[: column_index + 1]


def first_two(values: Mapping[Key, tuple[float, str]]) -> dict[Key, int]:
    """Return the ranks of the best (1) and second best (2) numbers, by key.

    Args:
        values: Number and text by key; smaller is better. Numbers with equal text share a rank.
    """
    ordered_values = sorted(values.values(), key=lambda value: value[0])
    best_texts = list(dict.fromkeys(shown_text for _, shown_text in ordered_values))[:2]
    return {
        key: best_texts.index(shown_text) + 1 for key, (_, shown_text) in values.items() if shown_text in best_texts
    }


def beside(
    table_title: Phrase,
    columns: Iterable[tuple[Column, Sequence[TableCell]]],
    *,
    groups: Sequence[str] = (),
    notes: Iterable[Phrase] = (),
) -> Table:
    """Return a table from columns.

    Args:
        table_title: Title.
        columns: Columns with their cells, all of the same length.
        groups: Group of each row; by default none.
        notes: Notes below the table.

    Raises:
        ValueError: The columns differ in length.
    """
    head_columns, column_cells = zip(*columns, strict=True)
    cell_rows = list(zip(*column_cells, strict=True))
    group_names = groups or [""] * len(cell_rows)
    table_rows = tuple(
        TableRow(cell_row, group_name) for cell_row, group_name in zip(cell_rows, group_names, strict=True)
    )
    return Table(table_title, head_columns, table_rows, tuple(notes))


def value_of(cell: TableCell) -> float:
    """Return the number of a cell, or the mean of its interval; NaN if it has none."""
    match cell:
        case Interval():
            return cell.mean
        case Compared():
            return cell.score
        case Graded():
            return cell.value
        case int() | float():
            return float(cell)
        case _:
            return math.nan
