"""Tables of a benchmark: medians, and ratios to the full cache."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvbench.analysis.speed.ratios import SIZE
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Cell, Column, Interval, Name, Table, TableRow

_COLUMNS = (
    Column("policy"),
    Column("budget"),
    Column("ms", NumberFormat.NUMBER, group="first token"),
    Column("to full", NumberFormat.TIMES, group="first token"),
    Column("ms", NumberFormat.NUMBER, group="decode step"),
    Column("to full", NumberFormat.TIMES, group="decode step"),
    Column("tokens/s", NumberFormat.NUMBER),
    Column("peak memory", NumberFormat.BYTES),
    Column("live", NumberFormat.BYTES, group="KV"),
    Column("to full", NumberFormat.PERCENT, group="KV"),
)


def bench_tables(summary: pd.DataFrame, model: str) -> Iterator[Table]:
    """Yield a table per context, batch and number of decode steps.

    Args:
        summary: Output of `kvbench.analysis.speed.ratios.summarize`.
        model: The model as the user named it.
    """
    for size_key, size_rows in summary.groupby(SIZE, sort=False):
        assert isinstance(size_key, tuple)
        context, batch, steps = size_key
        title = (
            Name(model),
            f" · context {context}, batch {batch}, {steps} decode steps; medians, and ratios to "
            "the full cache with their range over repeats",
        )
        yield Table(
            title,
            _COLUMNS,
            tuple(TableRow(_cells(summary_row)) for _, summary_row in size_rows.iterrows()),
        )


def _cells(summary_row: pd.Series) -> tuple[Cell, ...]:
    name_cells = (Name(str(summary_row["policy"])), Name(str(summary_row["budget"])))
    if summary_row["error"]:
        return (*name_cells, str(summary_row["error"])[:60], *[None] * (len(_COLUMNS) - 3))
    is_full = summary_row["policy"] == "full"
    return (
        *name_cells,
        summary_row["ttft_s"] * 1e3,
        None if is_full else _ratio(summary_row, "ttft_s"),
        summary_row["step_s"] * 1e3,
        None if is_full else _ratio(summary_row, "step_s"),
        summary_row["tokens_per_s"],
        summary_row["peak_bytes"],
        summary_row["kv_bytes_live"],
        summary_row["kv_bytes_live_ratio"],
    )


def _ratio(summary_row: pd.Series, column: str) -> Interval:
    return Interval(
        summary_row[f"{column}_ratio"],
        summary_row[f"{column}_ratio_lo"],
        summary_row[f"{column}_ratio_hi"],
    )
