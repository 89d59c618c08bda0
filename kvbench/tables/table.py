"""A table as a value: typed columns and cells, without a format.

Whatever shows a table makes a `Table` and hands it to an output of `kvbench.tables.outputs`:
terminal, Markdown, LaTeX, HTML or CSV. The outputs escape every text, so a table holds names and
messages exactly as a user, a model or a file wrote them.
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
    """A name that is shown verbatim, in a code font where the output has one."""

    text: str


@dataclass(frozen=True)
class Lines:
    """Phrases one below the other."""

    lines: tuple[Phrase, ...]


Phrase: TypeAlias = "str | Name | Lines | tuple[Phrase, ...]"
"""Text. The parts of a tuple are joined without a space."""


@dataclass(frozen=True)
class Interval:
    """A number with its 95% interval; NaN ends if the interval is unknown."""

    mean: float
    lo: float = math.nan
    hi: float = math.nan


@dataclass(frozen=True)
class Compared:
    """A score with its paired difference to another score."""

    score: float
    gap: Interval


@dataclass(frozen=True)
class Graded:
    """A number that says itself how it is written, and how it compares with others of its table.

    Attributes:
        value: The number; NaN is shown as a dash.
        kind: How it is written.
        signed: Whether it is a difference, which is written with a sign.
        rank: 1 for the best and 2 for the second best of those that it competes with, otherwise 0.
        better: Whether it is significantly better (+1) or worse (-1) than a reference, otherwise 0.
        p: The p-value of that, corrected for the other tests of the table; NaN if there is none.
    """

    value: float
    kind: NumberFormat
    signed: bool = False
    rank: int = 0
    better: int = 0
    p: float = math.nan

    @property
    def text(self) -> str:
        """The number as text, without its mark."""
        return number(self.value, self.kind, signed=self.signed)


Cell: TypeAlias = "float | int | Interval | Compared | Graded | Phrase | None"
"""None is shown as a dash. Text in a column of numbers says why there is no number."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        kind: How its numbers are written.
        group: A heading above neighbouring columns of the same group.
        better: Which numbers are better, if that is known.
        signed: Whether it holds differences, which are written with a sign.
        align: By default text stands left and numbers stand right.
        merged: Whether a cell is left blank if it and all before it repeat the row above, as for
            names of sections. CSV repeats them.
    """

    title: Phrase
    kind: NumberFormat = NumberFormat.TEXT
    group: str = ""
    better: Literal["higher", "lower", ""] = ""
    signed: bool = False
    align: Literal["left", "right", ""] = ""
    merged: bool = False

    @property
    def right(self) -> bool:
        """Whether the column is aligned to the right."""
        return self.align == "right" or (not self.align and self.kind is not NumberFormat.TEXT)

    def is_worse(self, cell: Cell) -> bool:
        """Whether a difference is certainly for the worse: all of its interval is."""
        if not (self.signed and self.better and isinstance(cell, Interval)):
            return False
        return cell.hi < 0 if self.better == "higher" else cell.lo > 0


@dataclass(frozen=True)
class TableRow:
    """A row of a table.

    Attributes:
        cells: A cell for each column.
        group: Rows of one group compete for the best number, such as those of one budget. A row
            without a group, such as the full cache's, competes with none.
    """

    cells: tuple[Cell, ...]
    group: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: What the table shows.
        columns: The columns.
        rows: The rows, in order; those of one group are neighbours.
        notes: What a reader must know, shown below.
    """

    title: Phrase
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[Phrase, ...] = ()

    @property
    def column_groups(self) -> list[tuple[str, int]]:
        """Runs of neighbouring columns with the same group: its heading and how many they are."""
        column_runs: list[tuple[str, int]] = []
        for column in self.columns:
            if column_runs and column_runs[-1][0] == column.group:
                column_runs[-1] = (column.group, column_runs[-1][1] + 1)
            else:
                column_runs.append((column.group, 1))
        return column_runs

    def ranks(self) -> dict[tuple[int, int], int]:
        """Best (1) and second best (2) cells by row and column.

        Numbers that read the same share a rank. A column is ranked if it says what is better and
        does not hold differences; a group of rows is ranked if two of its rows have a number.
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
        """Whether the cell in row i and column j is left blank; see `Column.merged`."""
        if not row_index or not self.columns[column_index].merged:
            return False
        return self.rows[row_index - 1].cells[: column_index + 1] == self.rows[row_index].cells[: column_index + 1]


def first_two(values: Mapping[Key, tuple[float, str]]) -> dict[Key, int]:
    """The best (1) and the second best (2) of some numbers, by key.

    Args:
        values: By key, a number that is smaller the better, and how it is shown. What reads the
            same shares a place.
    """
    ordered_values = sorted(values.values(), key=lambda value: value[0])
    best_texts = list(dict.fromkeys(shown_text for _, shown_text in ordered_values))[:2]
    return {
        key: best_texts.index(shown_text) + 1 for key, (_, shown_text) in values.items() if shown_text in best_texts
    }


def beside(
    table_title: Phrase,
    columns: Iterable[tuple[Column, Sequence[Cell]]],
    *,
    groups: Sequence[str] = (),
    notes: Iterable[Phrase] = (),
) -> Table:
    """Make a table of columns that stand side by side.

    Args:
        table_title: What it shows.
        columns: Columns with their cells, all of the same number.
        groups: The group of each row; by default the rows have none.
        notes: Shown below.

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


def value_of(cell: Cell) -> float:
    """The number of a cell, the mean of an interval; NaN if it has none."""
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
