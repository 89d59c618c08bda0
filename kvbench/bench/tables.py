"""The table of a benchmark: medians, and ratios to the full cache."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from kvbench.bench.compare import SIZE
from kvbench.report.numbers import Kind
from kvbench.report.table import Cell, Column, Interval, Name, Row, Table

_COLUMNS = (
    Column("policy"),
    Column("budget"),
    Column("ms", Kind.NUMBER, group="first token"),
    Column("to full", Kind.TIMES, group="first token"),
    Column("ms", Kind.NUMBER, group="decode step"),
    Column("to full", Kind.TIMES, group="decode step"),
    Column("tokens/s", Kind.NUMBER),
    Column("peak memory", Kind.BYTES),
    Column("live", Kind.BYTES, group="KV"),
    Column("to full", Kind.PERCENT, group="KV"),
)


def bench_tables(summary: pd.DataFrame, model: str) -> Iterator[Table]:
    """A table for every context, batch and number of decode steps.

    Args:
        summary: As `kvbench.bench.compare.summarize` returns it.
        model: The model as the user named it.
    """
    for key, part in summary.groupby(SIZE, sort=False):
        assert isinstance(key, tuple)
        context, batch, generate = key
        title = (
            Name(model),
            f" · context {context}, batch {batch}, {generate} decode steps; medians, and ratios to "
            "the full cache with their range over repeats",
        )
        yield Table(title, _COLUMNS, tuple(Row(_cells(row)) for _, row in part.iterrows()))


def _cells(row: pd.Series) -> tuple[Cell, ...]:
    names = (Name(str(row["policy"])), Name(str(row["budget"])))
    if row["error"]:
        return (*names, str(row["error"])[:60], *[None] * (len(_COLUMNS) - 3))
    is_full = row["policy"] == "full"
    return (
        *names,
        row["ttft_s"] * 1e3,
        None if is_full else _ratio(row, "ttft_s"),
        row["step_s"] * 1e3,
        None if is_full else _ratio(row, "step_s"),
        row["tokens_per_s"],
        row["peak_bytes"],
        row["kv_bytes_live"],
        row["kv_bytes_live_ratio"],
    )


def _ratio(row: pd.Series, name: str) -> Interval:
    return Interval(row[f"{name}_ratio"], row[f"{name}_ratio_lo"], row[f"{name}_ratio_hi"])
