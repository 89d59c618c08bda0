"""Ratios to the full cache, paired by repeat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from kvbench.analysis.speed.settings import LARGEST
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Column, Interval, Name, Table, TableCell, TableRow

SIZE = ["model", "context", "batch_setting", "generate", "chunk"]
"""Columns that compared settings share; the largest batches that fit are compared with each other."""
CELL = ["policy", "budget", "moment", *SIZE]
RATIOS = ("ttft_s", "step_s", "decode_s", "tokens_per_s", "total_tokens_per_s", "peak_bytes", "kv_bytes_live")
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
    Column("moment"),
    Column("ms", NumberFormat.NUMBER, group="first token"),
    Column("to full", NumberFormat.TIMES, group="first token"),
    Column("ms", NumberFormat.NUMBER, group="decode step"),
    Column("to full", NumberFormat.TIMES, group="decode step"),
    Column("tokens/s", NumberFormat.NUMBER),
    Column("peak memory", NumberFormat.BYTES),
    Column("live", NumberFormat.BYTES, group="KV"),
    Column("to full", NumberFormat.PERCENT, group="KV"),
)

_ANSWER_COLUMNS = (
    Column("model", merged=True),
    Column("prompt+answer", merged=True),
    Column("policy"),
    Column("budget"),
    Column("moment"),
    Column("batch", NumberFormat.COUNT),
    Column("overall, s", NumberFormat.NUMBER),
    Column("prompt, s", NumberFormat.NUMBER),
    Column("prompt, share", NumberFormat.PERCENT),
    Column("decoding, s", NumberFormat.NUMBER),
    Column("evicting, s", NumberFormat.NUMBER),
    Column("decoding", NumberFormat.NUMBER, group="tokens/s"),
    Column("to full", NumberFormat.TIMES, group="tokens/s"),
    Column("overall", NumberFormat.NUMBER, group="tokens/s"),
    Column("to full", NumberFormat.TIMES, group="tokens/s"),
    Column("KV at most", NumberFormat.BYTES),
)


def bench_tables(summary: pd.DataFrame) -> Iterator[Table]:
    """Yield a table per model, context, batch and number of decode steps, then those over all of them.

    Args:
        summary: Output of `kvbench.analysis.speed.ratios.summarize`.
    """
    shows_moment = set(summary["moment"]) != {"context"}
    columns = tuple(column for column in _COLUMNS if column.title != "moment" or shows_moment)
    for size_key, size_rows in summary.groupby(SIZE, sort=False):
        assert isinstance(size_key, tuple)
        model, context, batch, steps, chunk = size_key
        batch_text = "the largest batch that fits" if batch == LARGEST else f"batch {batch}"
        chunk_text = f" in chunks of {chunk}" if chunk else ""
        title = (
            Name(str(model)),
            f" · context {context}{chunk_text}, {batch_text}, {steps} decode steps; medians, and ratios to "
            "the full cache with their range over repeats",
        )
        yield Table(
            title,
            columns,
            tuple(TableRow(_cells(summary_row, shows_moment)) for _, summary_row in size_rows.iterrows()),
        )
    if shows_moment or LARGEST in set(summary["batch_setting"]):
        yield _answer_table(summary)
    if len(set(summary["chunk"]) - {0}) > 1:
        yield _chunk_table(summary[summary["chunk"] > 0])


def _cells(summary_row: pd.Series, shows_moment: bool) -> tuple[TableCell, ...]:
    name_cells: tuple[TableCell, ...] = (Name(str(summary_row["policy"])), Name(str(summary_row["budget"])))
    if shows_moment:
        name_cells += (_moment(summary_row),)
    if summary_row["error"]:
        return (*name_cells, str(summary_row["error"])[:60], *[None] * 7)
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


def _moment(row: pd.Series) -> str | None:
    """Return a row's moment; None for the full cache, which only chunks change."""
    return str(row["moment"]) if row["policy"] != "full" or row["chunk"] else None


def _answer_table(summary: pd.DataFrame) -> Table:
    """Return the times of prompt and answer of all sizes (D2O, tables 5 and 12 to 14; TRIM-KV, table 5)."""
    rows = []
    for _, row in summary.iterrows():
        names: tuple[TableCell, ...] = (
            Name(str(row["model"])),
            f"{row['context']}+{row['generate']}",
            Name(str(row["policy"])),
            Name(str(row["budget"])),
            _moment(row),
        )
        if row["error"]:
            rows.append(TableRow((*names, None, str(row["error"])[:60], *[None] * 9)))
            continue
        is_full = row["policy"] == "full"
        rows.append(
            TableRow(
                (
                    *names,
                    row["batch"],
                    row["total_s"],
                    row["ttft_s"],
                    row["prompt_share"],
                    row["decode_s"],
                    row["evict_s"],
                    row["tokens_per_s"],
                    None if is_full else row["tokens_per_s_ratio"],
                    row["total_tokens_per_s"],
                    None if is_full else row["total_tokens_per_s_ratio"],
                    row["kv_bytes_peak"],
                )
            )
        )
    return Table("prompt and answer; medians over repeats, ratios paired by repeat", _ANSWER_COLUMNS, tuple(rows))


def _chunk_table(chunked: pd.DataFrame) -> Table:
    """Return the time to the first token by chunk size, with speed-ups over the full cache (CriticalKV, table 6)."""
    line_keys = ["model", "context", "batch_setting", "generate"]
    cells = chunked.assign(
        column=chunked["policy"].where(chunked["policy"] == "full", chunked["policy"] + " " + chunked["budget"])
    )
    names = list(dict.fromkeys(cells["column"]))
    columns = [Column("model", merged=True), Column("context", NumberFormat.COUNT, merged=True)]
    columns += [Column("batch", merged=True), Column("chunk", NumberFormat.COUNT)]
    for name in names:
        columns.append(Column("s", NumberFormat.NUMBER, group=name))
        columns += [Column("speed-up", NumberFormat.TIMES, group=name)] * (name != "full")
    rows = []
    for key, line in cells.groupby([*line_keys, "chunk"], sort=False):
        assert isinstance(key, tuple)
        by_name = line.groupby("column").first()
        row_cells: list[TableCell] = [Name(str(key[0])), int(str(key[1])), str(key[2]), int(str(key[4]))]
        for name in names:
            # `ttft_s_ratio` is the time as a fraction of the full cache's
            seconds, ratio = by_name.loc[name, ["ttft_s", "ttft_s_ratio"]] if name in by_name.index else (None, None)
            row_cells.append(seconds)
            if name != "full":
                row_cells.append(None if ratio is None else 1 / float(ratio))
        rows.append(TableRow(tuple(row_cells)))
    return Table(
        "seconds to the first token, and speed-up over the full cache in the same chunks", tuple(columns), tuple(rows)
    )


def _ratio(summary_row: pd.Series, column: str) -> Interval:
    return Interval(
        summary_row[f"{column}_ratio"],
        summary_row[f"{column}_ratio_lo"],
        summary_row[f"{column}_ratio_hi"],
    )
