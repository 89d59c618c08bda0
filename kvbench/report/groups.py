"""The table of groups of tasks, with the scores that their YAML defines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvbench.report.panel import DOWN
from kvbench.tables.numbers import score_kind
from kvbench.tables.table import Column, Interval, Name, Table, TableCell, TableRow

_SHARED = ("task", "metric", "model", "length", "moment", "seed")
"""Columns that are shown only if they vary, except for the first two."""


def group_table(scores: pd.DataFrame) -> Table | None:
    """Return the scores of groups of tasks as a table; None if there are no groups.

    Args:
        scores: Rows of `metrics.parquet` for groups, as `kvbench.runs.load.load_groups` returns them.
    """
    if not len(scores):
        return None
    evicting = scores[scores["policy"] != "full"]  # the full cache has no moment
    varying = (evicting if len(evicting) else scores).nunique() > 1
    shown = [name for name in _SHARED if name in _SHARED[:2] or varying[name]]
    is_unit_scaled = bool(scores["score"].between(0, 1).all())
    kind = score_kind(unit_scaled=is_unit_scaled)
    columns = (
        *(Column({"task": "group"}.get(name, name), merged=True) for name in shown),
        Column("policy"),
        Column("budget", align="right"),
        Column("score", kind),
        Column("difference to full", kind, signed=True),
    )
    return Table("", columns, tuple(TableRow(_cells(row, shown)) for row in scores.to_dict("records")))


def _cells(row: Mapping[Any, Any], shown: list[str]) -> tuple[TableCell, ...]:
    """Return the cells of a row."""
    label = row["metric"] + (f",{row['filter']}" if row["filter"] else "")
    texts = {**row, "metric": label + DOWN * (not row["higher_is_better"])}
    is_full = row["policy"] == "full"
    difference = None if is_full else Interval(row["diff"], row["diff_lo"], row["diff_hi"])
    return (
        *(Name(str(texts[name])) for name in shown),
        Name(row["policy"]),
        Name(row["budget"]),
        row["score"],
        difference,
    )
