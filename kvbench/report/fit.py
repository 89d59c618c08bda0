"""Splits a table that is wider than the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from rich.console import Console
from rich.table import Table as RichTable

from kvbench.report.outputs import terminal
from kvbench.report.table import Column, Row, Table


def fitted(table: Table, console: Console) -> Iterator[RichTable]:
    """The table for `rich.print`, in as few parts as the console's width allows.

    Every part begins with the columns that name the rows: those before the first one that is
    aligned to the right.

    Args:
        table: The table.
        console: Where it will be printed.
    """
    lead = len(list(takewhile(lambda column: not column.right, table.columns)))
    parts: list[list[int]] = []
    for j in range(lead, len(table.columns)):
        if not parts or not _fits(_part(table, lead, [*parts[-1], j]), console):
            parts.append([])
        parts[-1].append(j)
    for i, columns in enumerate(parts):
        part = _part(table, lead, columns)
        if len(parts) > 1:
            part = replace(part, title=(part.title, f" ({i + 1} of {len(parts)})"))
        yield terminal(part if i + 1 == len(parts) else replace(part, notes=()))


def _part(table: Table, lead: int, columns: list[int]) -> Table:
    keep = [*range(lead), *columns]
    heads: tuple[Column, ...] = tuple(table.columns[j] for j in keep)
    rows = tuple(Row(tuple(row.cells[j] for j in keep), row.group) for row in table.rows)
    return replace(table, columns=heads, rows=rows)


def _fits(table: Table, console: Console) -> bool:
    bare = terminal(replace(table, title="", notes=()))
    unlimited = console.options.update(width=9999)
    return console.measure(bare, options=unlimited).maximum <= console.width
