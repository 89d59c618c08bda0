"""Scores of groups of tasks, aggregated as the YAML of the group says."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.harness.protocol import NO_FILTER, GroupMetric, LoadedTask, TaskGroup
from kvbench.runs.schema import SCORES, Row
from kvbench.stats import Floats

_SETTING = ("model", "length", "seed", "policy", "budget", "moment")
"""What the cells of one score of a group have in common."""


def group_rows(tasks: Iterable[LoadedTask], cell_rows: Iterable[Row], metric_rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of all groups: their `cell` is "", and their `task` is the group.

    A group has a score for every setting in which all of its tasks have one. The intervals of the tasks, which are
    independent, are combined by square-and-add.

    Args:
        tasks: The tasks of a run.
        cell_rows: Their rows of `cells.parquet`.
        metric_rows: Their rows of `metrics.parquet`.
    """
    groups = {group.name: group for task in tasks for group in task.groups}
    sizes = {str(row["cell"]): int(row["samples"]) for row in cell_rows}
    by_setting: dict[tuple[Any, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in metric_rows:
        by_setting[tuple(row[name] for name in _SETTING)][row["task"]].append(row)
    for rows_by_task in by_setting.values():
        for group in groups.values():
            if all(task in rows_by_task for task in group.tasks):
                for metric in group.metrics:
                    yield from _metric_rows(group, metric, rows_by_task, sizes)


def _metric_rows(
    group: TaskGroup, metric: GroupMetric, rows_by_task: Mapping[str, Sequence[Row]], sizes: Mapping[str, int]
) -> Iterator[Row]:
    """Yield the rows of a group for one metric and all of its filters; as in lm-eval, tasks without it do not count."""
    found = [row for task in group.tasks for row in rows_by_task[task] if row["metric"] == metric.metric]
    filters = metric.filters or tuple(sorted({row["filter"] or NO_FILTER for row in found}))
    for filter_name in filters:
        rows = [row for row in found if (row["filter"] or NO_FILTER) == filter_name]
        if not rows:
            continue
        weights = np.array([sizes[row["cell"]] if metric.by_size else 1 for row in rows], dtype=np.float64)
        yield {
            **rows[0],
            **_combined(rows, weights / weights.sum()),
            "cell": "",
            "task": group.name,
        }


def _combined(rows: Sequence[Row], shares: Floats) -> dict[str, float]:
    """Return the weighted mean of the scores of tasks, with its uncertainty."""
    columns = {name: np.array([row[name] for row in rows], dtype=np.float64) for name in SCORES}
    combined = {name: float(shares @ columns[name]) for name in ("score", "full_score", "diff")}
    combined["score_se"] = math.sqrt(float(np.square(shares * columns["score_se"]).sum()))
    for name in ("score", "diff"):
        below = math.sqrt(float(np.square(shares * (columns[name] - columns[f"{name}_lo"])).sum()))
        above = math.sqrt(float(np.square(shares * (columns[f"{name}_hi"] - columns[name])).sum()))
        combined |= {f"{name}_lo": combined[name] - below, f"{name}_hi": combined[name] + above}
    return combined
