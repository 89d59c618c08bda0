"""The mean over the tasks of a group, with intervals that respect pairing and contexts."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench.report.samples import Samples
from kvbench.stats import DRAWS, Floats, bounded_interval, few_vary, resampled, tail

SETTING = ["model", "model_revision", "group", "length", "seed"]
CONFIG = ["policy", "budget", "moment"]
HELD = ["held_entries", "kv_bytes_live", "kv_bytes_read", "kv_bytes_allocated", "kv_bytes_full"]
_BOUNDS = ["score", "score_lo", "score_hi", "diff", "diff_lo", "diff_hi"]


def group_means(
    cells: pd.DataFrame,
    samples: pd.DataFrame | Samples | None = None,
    *,
    seed: int = 0,
    n: int = DRAWS,
) -> pd.DataFrame:
    """The mean over the tasks of a group, per policy and budget, with intervals.

    Every task weighs the same. The bootstrap is stratified: contexts are drawn within each task,
    independently between tasks, and the same draw serves every policy, so differences to full are
    paired. A task in which few contexts vary adds its `bounded_interval` by square-and-add instead.
    With a single task the numbers are those of `summary` and `paired`.

    Tasks on which full is not above chance are left out. A group of several tasks has no mean, and
    no rows, if no task is left or if its tasks differ in direction or in scale. Without full no
    task can be compared with chance: then all tasks count and `discriminative` is false.

    Args:
        cells: The frame of `cells.parquet`.
        samples: The frame of `samples.parquet`. Without it the intervals of the tasks in `cells`
            are joined by square-and-add, which is nearly the same.
        seed: Seed of the bootstrap.
        n: Draws.

    Returns:
        A row per (model, group, length, seed, policy, budget, moment) with `status` ("error" if a
        task of the group failed; its numbers are then NaN), `tasks` and `samples` (counts),
        `discriminative`, `higher_is_better`, `score`, `score_lo`, `score_hi`, `full_score`,
        `diff`, `diff_lo`, `diff_hi`, and the mean over tasks of `held_entries`, `kv_bytes_live`,
        `kv_bytes_read`, `kv_bytes_allocated` and `kv_bytes_full`.
    """
    rows: list[dict[str, Any]] = []
    if isinstance(samples, pd.DataFrame):
        samples = Samples(samples)
    # A live dialogue has a full cache of its own.
    live = (cells["moment"] == "turns").rename("_live")
    for setting, part in cells.groupby([*SETTING, live], sort=False):
        names = list(setting) if isinstance(setting, tuple) else [setting]
        head = dict(zip(SETTING, names[:-1], strict=True))
        rows += [head | row for row in _group_rows(part, samples, seed, n)]
    return pd.DataFrame(rows)


def _group_rows(
    part: pd.DataFrame, samples: Samples | None, seed: int, n: int
) -> list[dict[str, Any]]:
    part = part.drop_duplicates([*CONFIG, "task"], keep="last")
    ok = part[part["status"] == "ok"]
    telling = ok.groupby("task")["discriminative"].all()
    # If full comes from another run than a policy, only full's own row knows.
    telling.update(ok[ok["policy"] == "full"].groupby("task")["discriminative"].all())
    compared = set(ok.loc[ok["policy"] == "full", "task"])
    tasks = sorted(telling.index[telling]) or sorted(set(telling.index) - compared)
    if len(telling) == 1:  # the task's own numbers are not a mean, so they are shown in any case
        tasks = sorted(telling.index)
    ok = ok[ok["task"].isin(tasks)]
    unit = ok.groupby("task")["score"].agg(lambda s: bool(s.between(0, 1).all()))
    if not tasks or ok["higher_is_better"].nunique() != 1 or unit.nunique() != 1:
        return []
    configs = list(part[CONFIG].drop_duplicates().itertuples(index=False, name=None))
    full = next((i for i, config in enumerate(configs) if config[0] == "full"), None)
    score, diff = _Strata(len(configs), n), _Strata(len(configs), n)
    for task in tasks:
        mine = ok[ok["task"] == task]
        if samples is None:
            known = mine.set_index(CONFIG)[_BOUNDS].reindex(pd.MultiIndex.from_tuples(configs))
            numbers = known.to_numpy(dtype=np.float64)
            score.add_interval(*numbers[:, :3].T)
            diff.add_interval(*numbers[:, 3:].T)
            continue
        cell_of = {tuple(row[:3]): str(row[3]) for row in mine[[*CONFIG, "cell"]].to_numpy()}
        values, codes = samples.wide(cell_of.get(config, "") for config in configs)
        if not len(values):
            score.miss()
            continue
        # Each task is a stratum with a stream of its own: with the same draws for all tasks their
        # errors would be taken for correlated. The stream hangs on the task's name, so that a mean
        # does not change with the other tasks of a run; one task alone has the draws of `summary`.
        stream = zlib.crc32(str(task).encode()) if len(tasks) > 1 else 0
        contexts = int(codes.max()) + 1
        draw = functools.partial(resampled, clusters=contexts, seed=seed, n=n, stream=stream)
        bounded = bool(np.nanmin(values) >= 0 and np.nanmax(values) <= 1)
        score.add(values, codes, draw, bounded, signed=False)
        if full is not None:
            # Subtracted before it is resampled: this is what pairs a policy with full.
            diff.add(values - values[:, [full]], codes, draw, bounded, signed=True)
    mean, lo, hi = score.interval()
    gap, gap_lo, gap_hi = diff.interval() if full is not None else (mean * np.nan,) * 3
    held = ok.groupby(CONFIG)[HELD].mean()
    counts = ok.groupby(CONFIG)["samples"].sum()
    rows = []
    for i, config in enumerate(configs):
        fine = bool(np.isfinite(mean[i]))
        same = i == full and fine
        rows.append(
            dict(zip(CONFIG, config, strict=True))
            | {
                "status": "ok" if fine else "error",
                "tasks": len(tasks),
                "samples": int(counts.loc[config]) if fine else 0,
                "discriminative": bool(telling.any()),
                "higher_is_better": bool(ok["higher_is_better"].iloc[0]),
                "score": mean[i],
                "score_lo": lo[i],
                "score_hi": hi[i],
                "full_score": mean[full] if full is not None and fine else np.nan,
                "diff": 0.0 if same else gap[i],
                "diff_lo": 0.0 if same else gap_lo[i],
                "diff_hi": 0.0 if same else gap_hi[i],
            }
            | {name: float(held.loc[config, name]) if fine else np.nan for name in HELD}
        )
    return rows


class _Strata:
    """Adds up a mean over tasks and its uncertainty, task by task.

    The uncertainty has two parts. Tasks in which many contexts vary add their resampled means, so
    that one quantile is taken of the sum. Tasks in which few vary have no useful resamples: they
    add the squared distances from their mean to the ends of `bounded_interval`, below and above.
    `interval` joins the two parts by square-and-add, as independent errors are.
    """

    def __init__(self, columns: int, n: int) -> None:
        self.count = 0
        self.mean = np.zeros(columns)
        self.draws = np.zeros((n, columns))
        self.tail = np.full(columns, 0.025)
        self.below = np.zeros(columns)
        self.above = np.zeros(columns)

    def miss(self) -> None:
        """A task without a sample: no column has a mean over all tasks."""
        self.mean += np.nan

    def add(
        self,
        values: Floats,
        codes: npt.NDArray[np.intp],
        draw: Callable[[Callable[[Floats], Floats]], Floats],
        bounded: bool,
        *,
        signed: bool,
    ) -> None:
        """Add a task.

        Args:
            values: `[keys, columns]`, NaN where a column lacks the key.
            codes: `[keys]`, the context of each key, ascending from 0.
            draw: `resampled` for the task's contexts.
            bounded: Whether scores lie in [0, 1].
            signed: Whether `values` are differences.
        """
        present = np.isfinite(values)
        # Keys are sorted by context, so the sums of a context are sums of neighbouring rows.
        starts = np.searchsorted(codes, np.arange(int(codes.max()) + 1))
        totals = np.add.reduceat(np.where(present, values, 0.0), starts, axis=0)
        sizes = np.add.reduceat(present.astype(np.float64), starts, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = totals.sum(0) / sizes.sum(0)
            draws = draw(lambda w: (w @ totals) / (w @ sizes))
        for k in np.flatnonzero(np.isfinite(mean)):
            some = sizes[:, k] > 0
            means = totals[some, k] / sizes[some, k]
            if bounded and few_vary(means):
                lo, hi = bounded_interval(means, sizes[some, k], signed=signed)
                self.below[k] += (mean[k] - lo) ** 2
                self.above[k] += (hi - mean[k]) ** 2
                draws[:, k] = mean[k]  # its uncertainty is in `below` and `above` already
            elif len(means) == 1:  # one context of an unbounded score says nothing about others
                self.below[k] = self.above[k] = np.inf
            elif signed or not bounded:
                self.tail[k] = tail(len(means))
        self.count += 1
        self.mean += mean
        self.draws += draws

    def add_interval(self, mean: Floats, lo: Floats, hi: Floats) -> None:
        """Add a task whose mean and interval alone are known, `[columns]` each."""
        self.count += 1
        self.mean += mean
        self.draws += mean
        self.below += (mean - lo) ** 2
        self.above += (hi - mean) ** 2

    def interval(self) -> tuple[Floats, Floats, Floats]:
        """Mean, lower and upper end for every column; NaN where a task is missing."""
        mean, draws = self.mean / self.count, self.draws / self.count
        lo, hi = np.full_like(mean, np.nan), np.full_like(mean, np.nan)
        for k in np.flatnonzero(np.isfinite(mean)):
            # Several tasks have contexts enough that their interval need not be expanded.
            outside = self.tail[k] if self.count == 1 else 0.025
            a, b = np.nanquantile(draws[:, k], [outside, 1 - outside])
            lo[k] = mean[k] - math.hypot(
                max(0.0, mean[k] - a), math.sqrt(self.below[k]) / self.count
            )
            hi[k] = mean[k] + math.hypot(
                max(0.0, b - mean[k]), math.sqrt(self.above[k]) / self.count
            )
        return mean, lo, hi
