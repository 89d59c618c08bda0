"""Scores of a task by a field of its rows, such as difficulty or question type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pandas as pd

from kvbench import stats
from kvbench.harness import catalogue
from kvbench.report.frames import extras, tasks_at_chance, unaveraged_tasks
from kvbench.report.overall import group_means
from kvbench.report.panel import Filled, Panel
from kvbench.report.sorted_samples import Samples
from kvbench.tables.table import Compared, Interval, Name, Table, TableCell, beside

MOST = 12
"""Maximum number of values of a field that divides a task."""
_HAS_FIGURE = ("depth",)
"""Fields with a separate figure."""
_QUESTION = ["sample_id", "question_id"]

Key: TypeAlias = tuple[str, int, int]
"""Sample, question and repeat, by which responses are paired."""
Scores: TypeAlias = dict[str, dict[Key, float]]
"""Scores of one cell by field value, then by key."""


def strata(panel: Panel, samples: Samples | None) -> Iterator[tuple[str, str, Table]]:
    """Yield every division of a panel's tasks by a field of `Request.extra`.

    A field divides a task if all its samples have it, with 2 to `MOST` values and at least two questions per value on
    average, which excludes ids. Tasks whose score is not a mean over samples are not divided.

    Args:
        panel: The panel.
        samples: The samples of its cells.

    Yields:
        Task, field and a table: a row per policy and budget, a column per value with the number of its questions.
        Differences from full are paired.
    """
    if samples is None:
        return
    left_out = {*tasks_at_chance(panel.cells), *unaveraged_tasks(panel.cells)}
    for task_name in panel.tasks:
        task_cells = panel.of_task(task_name)
        task_samples = samples.of(task_cells.loc[task_cells["status"] == "ok", "cell"])
        # Parts of an uninformative task are uninformative, and parts of some scores are not known.
        if task_name in left_out or not len(task_samples):
            continue
        for field_name, field_values in _dividing_fields(task_samples).items():
            yield (
                task_name,
                field_name,
                _table(panel, task_samples.assign(_value=field_values), task_name, field_name),
            )


def _dividing_fields(samples: pd.DataFrame) -> dict[str, pd.Series[Any]]:
    """Return the value of every dividing field, per sample."""
    extra_by_text = extras(samples)
    common_fields = sorted(set.intersection(*(set(extra_fields) for extra_fields in extra_by_text.values())))
    # Counted in questions, because repeats and policies add no information.
    max_values = min(MOST, len(samples.drop_duplicates(_QUESTION)) // 2)
    value_columns = {}
    for field_name in common_fields:
        value_by_text = {
            extra_json: str(extra_fields[field_name]) for extra_json, extra_fields in extra_by_text.items()
        }
        if field_name not in _HAS_FIGURE and 2 <= len(set(value_by_text.values())) <= max_values:
            value_columns[field_name] = samples["extra"].map(value_by_text)
    return value_columns


def _table(panel: Panel, samples: pd.DataFrame, task_name: str, field_name: str) -> Table:
    task_cells = panel.of_task(task_name)
    cell_scores = {
        str(cell_id): _scores(cell_samples)
        for cell_id, cell_samples in samples.groupby("cell", sort=False, observed=True)
    }
    # Pairs are clustered by context, as in `overall`. A context in several strata is drawn separately in each, because
    # each column is a separate estimate.
    context_by_key = dict(zip(_keys(samples), samples["context_id"].astype(str), strict=True))
    value_counts = samples.drop_duplicates(_QUESTION)["_value"].value_counts()
    full_cells = task_cells.loc[task_cells["policy"] == "full", "cell"]
    full_scores = cell_scores.get(str(full_cells.iloc[0]), {}) if len(full_cells) else {}

    def cell_of(cell_id: str, field_value: str) -> TableCell:
        value_scores = cell_scores[cell_id].get(field_value)
        if not value_scores:
            return None
        mean_score = sum(value_scores.values()) / len(value_scores)
        if field_value not in full_scores or cell_id == full_cells.iloc[0]:
            return mean_score
        difference = stats.paired(value_scores, full_scores[field_value], context_by_key)
        return Compared(mean_score, Interval(difference.mean, difference.lo, difference.hi))

    def filled(field_value: str) -> Filled:
        head_column, _ = panel.scores(task_cells, (Name(field_value), f" ({value_counts[field_value]})"))
        return panel.column(head_column, task_cells, lambda cell_row: cell_of(str(cell_row["cell"]), field_value))

    value_columns = [filled(field_value) for field_value in sorted(value_counts.index, key=_numbers_first)]
    table_title = (
        Name(task_name),
        " by ",
        Name(field_name),
        " (questions), with the paired difference from full.",
    )
    return beside(table_title, [*panel.names(), *value_columns])


def _scores(cell_samples: pd.DataFrame) -> Scores:
    """Return the scores of one cell."""
    value_scores: Scores = {}
    for response_key, field_value, score in zip(
        _keys(cell_samples), cell_samples["_value"], cell_samples["score"], strict=True
    ):
        value_scores.setdefault(str(field_value), {})[response_key] = float(score)
    return value_scores


def _keys(samples: pd.DataFrame) -> list[Key]:
    key_columns = (samples[column_name] for column_name in ("sample_id", "question_id", "repeat"))
    return [
        (str(sample_id), int(question_id), int(repeat))
        for sample_id, question_id, repeat in zip(*key_columns, strict=True)
    ]


def _numbers_first(field_value: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by size, then names."""
    try:
        return (False, float(field_value), field_value)
    except ValueError:
        return (True, 0.0, field_value)


def subset_means(panel: Panel, samples: Samples | None) -> dict[str, pd.DataFrame]:
    """Return `group_means` of each subset of the installed benchmark that was run, by name, in the benchmark's order.

    Empty if fewer than two subsets have means.
    """
    benchmark = catalogue.benchmark(panel.group)
    mean_frames = {}
    for subset_name, subset_tasks in (benchmark.subsets if benchmark else {}).items():
        subset_cells = panel.cells[panel.cells["task"].isin(subset_tasks)]
        mean_frame = group_means(subset_cells, samples) if len(subset_cells) else subset_cells
        if len(mean_frame):
            mean_frames[subset_name] = mean_frame
    return mean_frames if len(mean_frames) > 1 else {}


def subset_table(panel: Panel, samples: Samples | None) -> Table | None:
    """Return `subset_means` as a table: a row per policy and budget, a column per subset."""
    mean_frames = subset_means(panel, samples)
    columns = [
        panel.compared(mean_frame, (Name(subset_name), f" ({int(mean_frame['tasks'].max())})"))
        for subset_name, mean_frame in mean_frames.items()
    ]
    table_title = "Means of subsets (number of tasks) with the paired difference from full."
    return beside(table_title, [*panel.names(), *columns]) if columns else None
