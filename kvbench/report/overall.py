"""Means over the tasks of a group, with intervals that account for pairing and contexts."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench.report.sorted_samples import Samples
from kvbench.runs.schema import CELL_COLUMNS, UNBOUNDED
from kvbench.stats import (
    DRAWS,
    Difference,
    Floats,
    bounded_interval,
    few_contexts,
    few_vary,
    resampled,
    student_half_width,
    tail,
)

SETTING = ["model", "model_revision", "group", "length", "seed"]
CONFIG = ["policy", "budget", "moment"]
MEMORY = [column.name for column in CELL_COLUMNS if column.summarised]
_BOUNDS = ["score", "score_lo", "score_hi", "diff", "diff_lo", "diff_hi"]


def group_means(
    cells: pd.DataFrame,
    samples: pd.DataFrame | Samples | None = None,
    *,
    seed: int = 0,
    n: int = DRAWS,
) -> pd.DataFrame:
    """Return the mean over the tasks of a group, per policy and budget, with intervals.

    Every task has the same weight. The bootstrap is stratified: contexts are drawn within each task, independently
    between tasks. All policies share the draws, so differences from full are paired. A task in which few contexts vary
    contributes its `bounded_interval` by square-and-add instead. With a single task, the numbers are those of `summary`
    and `paired`.

    Tasks on which full is not above chance are left out, and so are tasks whose score is not a mean over samples
    (`is_mean`); the interval of such a task alone is that of its cells. A group of several tasks has no mean, and no
    rows, if no task is left or if its tasks differ in direction or scale. Without full, no task can be compared with
    chance: all tasks count and `discriminative` is false.

    Args:
        cells: The frame of `cells.parquet`.
        samples: The frame of `samples.parquet`. Without it, the intervals of the tasks in `cells` are combined by
            square-and-add, which is nearly the same.
        seed: Seed of the bootstrap.
        n: Number of bootstrap resamples.

    Returns:
        A row per (model, group, length, seed, policy, budget, moment) with `status` ("error" if a task of the group
        failed; its numbers are then NaN), `tasks` and `samples` (counts), `discriminative`, `informed`, `metric` ("" if
        tasks differ), `higher_is_better`, `score`, `score_lo`, `score_hi`, `full_score` (on the samples that both
        have), `diff`, `diff_lo`, `diff_hi`, and the mean over tasks of `budget_entries`, `held_entries`,
        `kv_bytes_live`, `kv_bytes_read`, `kv_bytes_allocated`, `kv_bytes_full` and `kl`.
    """
    mean_rows: list[dict[str, Any]] = []
    if isinstance(samples, pd.DataFrame):
        samples = Samples(samples)
    # A live dialogue has a separate full cache.
    is_live = (cells["moment"] == "turns").rename("_live")
    for setting_key, setting_cells in cells.groupby([*SETTING, is_live], sort=False):
        setting_values = list(setting_key) if isinstance(setting_key, tuple) else [setting_key]
        setting_fields = dict(zip(SETTING, setting_values[:-1], strict=True))
        mean_rows += [setting_fields | mean_row for mean_row in _group_rows(setting_cells, samples, seed, n)]
    return pd.DataFrame(mean_rows)


def _group_rows(group_cells: pd.DataFrame, samples: Samples | None, seed: int, draw_count: int) -> list[dict[str, Any]]:
    group_cells = group_cells.drop_duplicates([*CONFIG, "task"], keep="last")
    ok_cells = group_cells[group_cells["status"] == "ok"]
    has_several_tasks = ok_cells["task"].nunique() > 1
    if has_several_tasks:
        ok_cells = ok_cells[~ok_cells["task"].isin(ok_cells.loc[~ok_cells["is_mean"], "task"])]
    is_informative = ok_cells.groupby("task")["discriminative"].all()
    # If full is from another run than a policy, only the row of full is reliable.
    is_informative.update(ok_cells[ok_cells["policy"] == "full"].groupby("task")["discriminative"].all())
    compared_tasks = set(ok_cells.loc[ok_cells["policy"] == "full", "task"])
    mean_tasks = sorted(is_informative.index[is_informative]) or sorted(set(is_informative.index) - compared_tasks)
    if not has_several_tasks:  # a single task is not a mean, so it is always included
        mean_tasks = sorted(is_informative.index)
    ok_cells = ok_cells[ok_cells["task"].isin(mean_tasks)]
    is_unit = ok_cells["score"].between(0, 1) & ~ok_cells["metric"].isin(UNBOUNDED)
    unit_by_task = is_unit.groupby(ok_cells["task"]).all()
    if not mean_tasks or ok_cells["higher_is_better"].nunique() != 1 or unit_by_task.nunique() != 1:
        return []
    configs = list(group_cells[CONFIG].drop_duplicates().itertuples(index=False, name=None))
    full_index = next((config_index for config_index, config in enumerate(configs) if config[0] == "full"), None)
    score_strata, diff_strata = _Strata(len(configs), draw_count), _Strata(len(configs), draw_count)
    full_means = np.zeros(len(configs))
    for task_name in mean_tasks:
        task_cells = ok_cells[ok_cells["task"] == task_name]
        if samples is None or not task_cells["is_mean"].all():
            bounds_frame = task_cells.set_index(CONFIG)[_BOUNDS].reindex(pd.MultiIndex.from_tuples(configs))
            task_bounds = bounds_frame.to_numpy(dtype=np.float64)
            score_strata.add_interval(*task_bounds[:, :3].T)
            diff_strata.add_interval(*task_bounds[:, 3:].T)
            full_means += task_cells.set_index(CONFIG)["full_score"].reindex(bounds_frame.index).to_numpy(np.float64)
            continue
        cell_by_config = {
            tuple(cell_row[:3]): str(cell_row[3]) for cell_row in task_cells[[*CONFIG, "cell"]].to_numpy()
        }
        score_values, context_codes = samples.wide(cell_by_config.get(config, "") for config in configs)
        if not len(score_values):
            score_strata.miss()
            continue
        resample = _resampler(task_name, len(mean_tasks), context_codes, seed, draw_count)
        has_bounds = not task_cells["metric"].isin(UNBOUNDED).any()
        is_bounded = has_bounds and bool(np.nanmin(score_values) >= 0 and np.nanmax(score_values) <= 1)
        score_strata.add(score_values, context_codes, resample, is_bounded, signed=False)
        if full_index is not None:
            # Subtracted before resampling, which pairs a policy with full.
            full_values = score_values[:, [full_index]]
            diff_strata.add(score_values - full_values, context_codes, resample, is_bounded, signed=True)
            common = np.isfinite(score_values) & np.isfinite(full_values)
            full_means += np.where(common, full_values, 0.0).sum(0) / np.where(common.any(0), common.sum(0), np.nan)
    informed_policies = {str(policy) for policy in group_cells.loc[group_cells["informed"], "policy"]}
    mean, lower, upper = score_strata.interval()
    gap_mean, gap_lower, gap_upper = diff_strata.interval() if full_index is not None else (mean * np.nan,) * 3
    cells_by_config = ok_cells.groupby(CONFIG)
    labels = pd.MultiIndex.from_tuples(configs)
    held_means = cells_by_config[MEMORY].mean().reindex(labels).to_numpy(dtype=np.float64)
    sample_counts = cells_by_config["samples"].sum().reindex(labels, fill_value=0).to_numpy()
    metric_names = set(ok_cells["metric"])
    metric = metric_names.pop() if len(metric_names) == 1 else ""
    higher_is_better = bool(ok_cells["higher_is_better"].iloc[0])
    mean_rows = []
    for config_index, config in enumerate(configs):
        is_complete = bool(np.isfinite(mean[config_index]))
        has_full, is_full = full_index is not None, config_index == full_index and is_complete
        mean_rows.append(
            dict(zip(CONFIG, config, strict=True))
            | {
                "status": "ok" if is_complete else "error",
                "tasks": len(mean_tasks),
                "samples": int(sample_counts[config_index]) if is_complete else 0,
                "discriminative": bool(is_informative.any()),
                "informed": config[0] in informed_policies,
                "metric": metric,
                "higher_is_better": higher_is_better,
                "score": mean[config_index],
                "score_lo": lower[config_index],
                "score_hi": upper[config_index],
                "full_score": full_means[config_index] / len(mean_tasks) if has_full and is_complete else np.nan,
                "diff": 0.0 if is_full else gap_mean[config_index],
                "diff_lo": 0.0 if is_full else gap_lower[config_index],
                "diff_hi": 0.0 if is_full else gap_upper[config_index],
            }
            | {
                held_column: float(held_mean) if is_complete else np.nan
                for held_column, held_mean in zip(MEMORY, held_means[config_index], strict=True)
            }
        )
    return mean_rows


def mean_difference(
    task_differences: Mapping[str, tuple[Floats, npt.NDArray[np.intp]]], *, is_bounded: bool, seed: int = 0
) -> Difference:
    """Return the mean over tasks of paired differences, with the interval of `group_means`.

    Args:
        task_differences: For each task, the differences `[keys]` and the context of each, ascending from 0.
        is_bounded: Whether scores lie in [0, 1].
        seed: Seed of the bootstrap.
    """
    columns = {task: (differences[:, None], codes) for task, (differences, codes) in task_differences.items()}
    mean, lower, upper = (float(bound[0]) for bound in mean_differences(columns, is_bounded=is_bounded, seed=seed))
    return Difference(mean, lower, upper, sum(len(differences) for differences, _ in task_differences.values()))


def mean_differences(
    task_differences: Mapping[str, tuple[Floats, npt.NDArray[np.intp]]], *, is_bounded: bool, seed: int = 0
) -> tuple[Floats, Floats, Floats]:
    """Return the means over tasks of several paired differences, and the ends of their intervals, `[columns]` each.

    Args:
        task_differences: For each task, the differences `[keys, columns]` and the context of each key, ascending from
            0. The draws are those of `mean_difference` for every column.
        is_bounded: Whether scores lie in [0, 1].
        seed: Seed of the bootstrap.
    """
    strata = _Strata(next(iter(task_differences.values()))[0].shape[1], DRAWS)
    for task_name, (differences, context_codes) in task_differences.items():
        resample = _resampler(task_name, len(task_differences), context_codes, seed, DRAWS)
        strata.add(differences, context_codes, resample, is_bounded, signed=True)
    return strata.interval()


def _resampler(
    task_name: str, task_count: int, context_codes: npt.NDArray[np.intp], seed: int, draw_count: int
) -> Callable[[Callable[[Floats], Floats]], Floats]:
    """Return `resampled` for the contexts of one of several tasks.

    Each task is a stratum with a separate stream: common draws would correlate the errors of tasks. The stream depends
    on the task's name, so that a mean does not change with the other tasks of a run; a single task has the draws of
    `summary`.
    """
    return functools.partial(
        resampled,
        cluster_count=int(context_codes.max()) + 1,
        seed=seed,
        draw_count=draw_count,
        stream=zlib.crc32(str(task_name).encode()) if task_count > 1 else 0,
    )


class _Strata:
    """Accumulates a mean over tasks and its uncertainty, task by task.

    The uncertainty has two parts. Tasks in which many contexts vary add their resampled means, and quantiles are taken
    of the sum. Tasks in which few vary have no useful resamples: they add the squared distances from their mean to the
    ends of `bounded_interval` or, without bounds, of Student's interval. `interval` combines the two parts by
    square-and-add, as they are independent.
    """

    def __init__(self, column_count: int, draw_count: int) -> None:
        self.count = 0
        self.mean = np.zeros(column_count)
        self.draws = np.zeros((draw_count, column_count))
        self.tail = np.full(column_count, 0.025)
        self.below = np.zeros(column_count)
        self.above = np.zeros(column_count)

    def miss(self) -> None:
        """Add a task without samples, so that no column has a mean over all tasks."""
        self.mean += np.nan

    def add(
        self,
        score_values: Floats,
        context_codes: npt.NDArray[np.intp],
        resample: Callable[[Callable[[Floats], Floats]], Floats],
        is_bounded: bool,
        *,
        signed: bool,
    ) -> None:
        """Add a task.

        Args:
            score_values: `[keys, columns]`, NaN if a column lacks the key.
            context_codes: `[keys]`, the context of each key, ascending from 0.
            resample: `resampled` for the task's contexts.
            is_bounded: Whether scores lie in [0, 1].
            signed: Whether `score_values` are differences.
        """
        is_present = np.isfinite(score_values)
        # Keys are sorted by context, so the rows of a context are adjacent.
        context_starts = np.searchsorted(context_codes, np.arange(int(context_codes.max()) + 1))
        context_totals = np.add.reduceat(np.where(is_present, score_values, 0.0), context_starts, axis=0)
        context_sizes = np.add.reduceat(is_present.astype(np.float64), context_starts, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            task_mean = context_totals.sum(0) / context_sizes.sum(0)
            mean_draws = resample(lambda weights: (weights @ context_totals) / (weights @ context_sizes))
        for column_index in np.flatnonzero(np.isfinite(task_mean)):
            is_nonempty = context_sizes[:, column_index] > 0
            context_means = context_totals[is_nonempty, column_index] / context_sizes[is_nonempty, column_index]
            if is_bounded and few_vary(context_means):
                lower, upper = bounded_interval(context_means, context_sizes[is_nonempty, column_index], signed=signed)
                self.below[column_index] += (task_mean[column_index] - lower) ** 2
                self.above[column_index] += (upper - task_mean[column_index]) ** 2
                # The uncertainty of this task is in `below` and `above` already.
                mean_draws[:, column_index] = task_mean[column_index]
            elif len(context_means) == 1:  # a single context with an unbounded score has no interval
                self.below[column_index] = self.above[column_index] = np.inf
            elif not is_bounded and few_contexts(len(context_means)):
                half_width = student_half_width(
                    context_totals[is_nonempty, column_index], context_sizes[is_nonempty, column_index]
                )
                self.below[column_index] += half_width**2
                self.above[column_index] += half_width**2
                mean_draws[:, column_index] = task_mean[column_index]
            elif signed or not is_bounded:
                self.tail[column_index] = tail(len(context_means))
        self.count += 1
        self.mean += task_mean
        self.draws += mean_draws

    def add_interval(self, mean: Floats, lower: Floats, upper: Floats) -> None:
        """Add a task with only mean and interval, `[columns]` each."""
        self.count += 1
        self.mean += mean
        self.draws += mean
        self.below += (mean - lower) ** 2
        self.above += (upper - mean) ** 2

    def interval(self) -> tuple[Floats, Floats, Floats]:
        """Return mean, lower and upper end for every column; NaN if a task is missing."""
        mean, mean_draws = self.mean / self.count, self.draws / self.count
        lower, upper = np.full_like(mean, np.nan), np.full_like(mean, np.nan)
        for column_index in np.flatnonzero(np.isfinite(mean)):
            # Several tasks together have enough contexts, so the interval need not be expanded.
            tail_share = self.tail[column_index] if self.count == 1 else 0.025
            lower_quantile, upper_quantile = np.nanquantile(mean_draws[:, column_index], [tail_share, 1 - tail_share])
            lower[column_index] = mean[column_index] - math.hypot(
                max(0.0, mean[column_index] - lower_quantile),
                math.sqrt(self.below[column_index]) / self.count,
            )
            upper[column_index] = mean[column_index] + math.hypot(
                max(0.0, upper_quantile - mean[column_index]),
                math.sqrt(self.above[column_index]) / self.count,
            )
        return mean, lower, upper
