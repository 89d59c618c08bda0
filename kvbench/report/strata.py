"""Scores within a task by a field that its rows carry, such as difficulty or type of question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pandas as pd

from kvbench import stats
from kvbench.report.frames import extras, silent_tasks
from kvbench.report.panel import Filled, Panel
from kvbench.report.samples import Samples
from kvbench.report.table import Cell, Compared, Interval, Name, Table, beside

MOST = 12
"""A field with more values than this divides no task."""
_HAS_FIGURE = ("depth",)
"""Fields with a figure of their own."""
_QUESTION = ["sample_id", "question_id"]

Key: TypeAlias = tuple[str, int, int]
"""Sample, question and repeat: what two cells are paired by."""
Scores: TypeAlias = dict[str, dict[Key, float]]
"""Scores of one cell by value of the field, then by key."""


def strata(panel: Panel, samples: Samples | None) -> Iterator[tuple[str, str, Table]]:
    """Every division of a panel's tasks.

    A field of `Request.extra` divides a task if all its samples have it, with 2 to `MOST` values
    and at least two questions for each value on average. A field that names single rows, such as
    an id, thus divides nothing.

    Args:
        panel: The panel.
        samples: The samples of its cells.

    Yields:
        Task, field and a table: a row per policy and budget, a column per value with the number of
        its questions. Differences to full are paired.
    """
    if samples is None:
        return
    silent = silent_tasks(panel.cells)
    for task in panel.tasks:
        cells = panel.of_task(task)
        mine = samples.of(cells.loc[cells["status"] == "ok", "cell"])
        if task in silent or not len(mine):  # parts of what tells nothing apart tell nothing
            continue
        for field, values in _dividing_fields(mine).items():
            yield task, field, _table(panel, mine.assign(_value=values), task, field)


def _dividing_fields(samples: pd.DataFrame) -> dict[str, pd.Series[Any]]:
    """The value of every dividing field, per sample."""
    by_text = extras(samples)
    common = sorted(set.intersection(*(set(extra) for extra in by_text.values())))
    # Counted in questions: repeats and policies do not make a division any finer.
    most = min(MOST, len(samples.drop_duplicates(_QUESTION)) // 2)
    fields = {}
    for name in common:
        values = {text: str(extra[name]) for text, extra in by_text.items()}
        if name not in _HAS_FIGURE and 2 <= len(set(values.values())) <= most:
            fields[name] = samples["extra"].map(values)
    return fields


def _table(panel: Panel, samples: pd.DataFrame, task: str, field: str) -> Table:
    cells = panel.of_task(task)
    scores = {
        str(cell): _scores(part)
        for cell, part in samples.groupby("cell", sort=False, observed=True)
    }
    # Pairs are clustered by context, as in `overall`: one context may lie in several strata, and
    # then it is drawn in each of them on its own, because each column is an estimate by itself.
    clusters = dict(zip(_keys(samples), samples["context_id"].astype(str), strict=True))
    counts = samples.drop_duplicates(_QUESTION)["_value"].value_counts()
    full = cells.loc[cells["policy"] == "full", "cell"]
    reference = scores.get(str(full.iloc[0]), {}) if len(full) else {}

    def cell_of(cell: str, value: str) -> Cell:
        own = scores[cell].get(value)
        if not own:
            return None
        mean = sum(own.values()) / len(own)
        if value not in reference or cell == full.iloc[0]:
            return mean
        gap = stats.paired(own, reference[value], clusters)
        return Compared(mean, Interval(gap.mean, gap.lo, gap.hi))

    def filled(value: str) -> Filled:
        head, _ = panel.scores(cells, (Name(value), f" ({counts[value]})"))
        return panel.column(head, cells, lambda row: cell_of(str(row["cell"]), value))

    columns = [filled(value) for value in sorted(counts.index, key=_numbers_first)]
    title = (Name(task), " by ", Name(field), " (questions), with the paired difference to full.")
    return beside(title, [*panel.names(), *columns])


def _scores(part: pd.DataFrame) -> Scores:
    """Scores of one cell."""
    scores: Scores = {}
    for key, value, score in zip(_keys(part), part["_value"], part["score"], strict=True):
        scores.setdefault(str(value), {})[key] = float(score)
    return scores


def _keys(samples: pd.DataFrame) -> list[Key]:
    columns = (samples[name] for name in ("sample_id", "question_id", "repeat"))
    return [(str(a), int(b), int(c)) for a, b, c in zip(*columns, strict=True)]


def _numbers_first(value: str) -> tuple[bool, float, str]:
    """Orders numbers by size, before names."""
    try:
        return (False, float(value), value)
    except ValueError:
        return (True, 0.0, value)
