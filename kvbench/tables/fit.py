"""Splitting of tables that are wider than the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from rich.console import Console
from rich.table import Table as RichTable

from kvbench.tables.outputs import terminal
from kvbench.tables.table import Column, Table, TableRow


def fitted(table: Table, console: Console) -> Iterator[RichTable]:
    """Yield the table for `rich.print`, in as few parts as the width of the console allows.

    Every part begins with the row labels: the columns before the first right-aligned one.
    """
    lead_count = len(list(takewhile(lambda column: not column.right, table.columns)))
    column_blocks: list[list[int]] = []
    for column_index in range(lead_count, len(table.columns)):
        if not column_blocks or not _fits(
            _select_columns(table, lead_count, [*column_blocks[-1], column_index]), console
        ):
            column_blocks.append([])
        column_blocks[-1].append(column_index)
    for block_index, column_indices in enumerate(column_blocks):
        table_block = _select_columns(table, lead_count, column_indices)
        if len(column_blocks) > 1:
            table_block = replace(
                table_block,
                title=(table_block.title, f" ({block_index + 1} of {len(column_blocks)})"),
            )
        yield terminal(table_block if block_index + 1 == len(column_blocks) else replace(table_block, notes=()))


def _select_columns(table: Table, lead_count: int, column_indices: list[int]) -> Table:
    kept_indices = [*range(lead_count), *column_indices]
    kept_columns: tuple[Column, ...] = tuple(table.columns[column_index] for column_index in kept_indices)
    kept_rows = tuple(
        TableRow(tuple(table_row.cells[column_index] for column_index in kept_indices), table_row.group)
        for table_row in table.rows
    )
    return replace(table, columns=kept_columns, rows=kept_rows)


def _fits(table: Table, console: Console) -> bool:
    bare_table = terminal(replace(table, title="", notes=()))
    unlimited = console.options.update(width=9999)
    return console.measure(bare_table, options=unlimited).maximum <= console.width
