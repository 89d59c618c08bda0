"""A table as a value: typed columns and cells, without a format.

Whatever shows a table makes a `Table` and hands it to an output of `kvbench.report.outputs`:
terminal, Markdown, LaTeX, HTML or CSV. The outputs escape every text, so a table holds names and
messages exactly as a user, a model or a file wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from kvbench.report.numbers import Kind, number

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
    kind: Kind
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
    kind: Kind = Kind.TEXT
    group: str = ""
    better: Literal["higher", "lower", ""] = ""
    signed: bool = False
    align: Literal["left", "right", ""] = ""
    merged: bool = False

    @property
    def right(self) -> bool:
        """Whether the column is aligned to the right."""
        return self.align == "right" or (not self.align and self.kind is not Kind.TEXT)

    def is_worse(self, cell: Cell) -> bool:
        """Whether a difference is certainly for the worse: all of its interval is."""
        if not (self.signed and self.better and isinstance(cell, Interval)):
            return False
        return cell.hi < 0 if self.better == "higher" else cell.lo > 0


@dataclass(frozen=True)
class Row:
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
    rows: tuple[Row, ...]
    notes: tuple[Phrase, ...] = ()

    @property
    def column_groups(self) -> list[tuple[str, int]]:
        """Runs of neighbouring columns with the same group: its heading and how many they are."""
        runs: list[tuple[str, int]] = []
        for column in self.columns:
            if runs and runs[-1][0] == column.group:
                runs[-1] = (column.group, runs[-1][1] + 1)
            else:
                runs.append((column.group, 1))
        return runs

    def ranks(self) -> dict[tuple[int, int], int]:
        """Best (1) and second best (2) cells by row and column.

        Numbers that read the same share a rank. A column is ranked if it says what is better and
        does not hold differences; a group of rows is ranked if two of its rows have a number.
        """
        ranks: dict[tuple[int, int], int] = {}
        for j, column in enumerate(self.columns):
            if not column.better or column.signed:
                continue
            sign = 1 if column.better == "lower" else -1
            for group in dict.fromkeys(row.group for row in self.rows if row.group):
                values = {
                    i: value
                    for i, row in enumerate(self.rows)
                    if row.group == group and not math.isnan(value := value_of(row.cells[j]))
                }
                if len(values) < 2:
                    continue
                texts = {i: number(value, column.kind) for i, value in values.items()}
                places = first_two({i: (sign * values[i], texts[i]) for i in values})
                ranks |= {(i, j): place for i, place in places.items()}
        return ranks

    def repeats(self, i: int, j: int) -> bool:
        """Whether the cell in row i and column j is left blank; see `Column.merged`."""
        if not i or not self.columns[j].merged:
            return False
        return self.rows[i - 1].cells[: j + 1] == self.rows[i].cells[: j + 1]


def first_two(values: Mapping[Key, tuple[float, str]]) -> dict[Key, int]:
    """The best (1) and the second best (2) of some numbers, by key.

    Args:
        values: By key, a number that is smaller the better, and how it is shown. What reads the
            same shares a place.
    """
    ordered = sorted(values.values(), key=lambda value: value[0])
    shown = list(dict.fromkeys(text for _, text in ordered))[:2]
    return {key: shown.index(text) + 1 for key, (_, text) in values.items() if text in shown}


def beside(
    title: Phrase,
    columns: Iterable[tuple[Column, Sequence[Cell]]],
    *,
    groups: Sequence[str] = (),
    notes: Iterable[Phrase] = (),
) -> Table:
    """Make a table of columns that stand side by side.

    Args:
        title: What it shows.
        columns: Columns with their cells, all of the same number.
        groups: The group of each row; by default the rows have none.
        notes: Shown below.

    Raises:
        ValueError: The columns differ in length.
    """
    heads, cells = zip(*columns, strict=True)
    lines = list(zip(*cells, strict=True))
    named = groups or [""] * len(lines)
    rows = tuple(Row(line, group) for line, group in zip(lines, named, strict=True))
    return Table(title, heads, rows, tuple(notes))


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
