"""Ratios to the full cache, paired by repeat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Column, Interval, Name, Table, TableCell, TableRow

SIZE = ["context", "batch", "generate"]
CELL = ["policy", "budget", *SIZE]
RATIOS = ("ttft_s", "step_s", "tokens_per_s", "peak_bytes", "kv_bytes_live")
"""Measurements with ratios to the full cache."""


def summarize(frame: pd.DataFrame) -> pd.DataFrame:
    """Return medians over repeats, with ratios to the full cache.

    A ratio is the median over repeats of a setting's value divided by the full cache's value in the same repeat, so
    that a temporarily busy machine affects both.

    Args:
        frame: Output of `kvbench.analysis.speed.timing.run_bench`.

    Returns:
        A row per setting: medians of the measurements; for each of `RATIOS` a column `NAME_ratio` with the smallest and
            largest ratio in `NAME_ratio_lo` and `NAME_ratio_hi`; and `error`.
    """
    full_rows = frame[frame["policy"] == "full"].set_index([*SIZE, "repeat"])
    summary_rows = []
    for cell_key, repeats in frame.groupby(CELL, sort=False):
        assert isinstance(cell_key, tuple)
        summary_row: dict[str, Any] = dict(zip(CELL, cell_key, strict=True))
        number_columns = repeats.select_dtypes("number").columns.difference([*SIZE, "repeat"])
        summary_row |= {str(column): median for column, median in repeats[number_columns].median().items()}
        baseline = full_rows.reindex(pd.MultiIndex.from_frame(repeats[[*SIZE, "repeat"]]))
        for column in RATIOS:
            ratio_values = repeats[column].to_numpy() / baseline[column].to_numpy()
            ratios = pd.Series(ratio_values)
            summary_row |= {
                f"{column}_ratio": ratios.median(),
                f"{column}_ratio_lo": ratios.min(),
                f"{column}_ratio_hi": ratios.max(),
            }
        summary_row["error"] = next((error for error in repeats["error"] if error), "")
        summary_rows.append(summary_row)
    return pd.DataFrame(summary_rows)


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


def _cells(summary_row: pd.Series) -> tuple[TableCell, ...]:
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
