"""Paired comparison of two policies of a run: overall, per moment and budget, and per task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench import stats
from kvbench.errors import UserError, nearest
from kvbench.regression import significance
from kvbench.regression.compare import LEAST_ALPHA, check_share
from kvbench.report.frames import (
    Results,
    budget_order,
    informed_policies,
    tasks_at_chance,
    unaveraged_tasks,
    unit_scale,
)
from kvbench.report.overall import SETTING, mean_difference
from kvbench.report.sorted_samples import Samples

Point: TypeAlias = tuple[str, str]
"""Moment and budget."""


@dataclass(frozen=True)
class PolicyDifference:
    """Paired difference of two policies, averaged over tasks, moments and budgets.

    Attributes:
        tasks: The tasks, which have equal weights.
        points: Moments and budgets; every question is averaged over them before it is paired.
        base_score: Mean score of the base policy.
        score: Mean score of the other policy.
        change: Score minus base score, with its 95% interval.
        p: Two-sided p-value of the difference.
        contexts: Number of common contexts.
        differs: Whether the scores of any context differ.
        p_corrected: The same after Holm's correction for the tests of its family.
        family_size: Number of tests in the family.
    """

    tasks: tuple[str, ...]
    points: tuple[Point, ...]
    base_score: float
    score: float
    change: stats.Difference
    p: float
    contexts: int
    differs: bool
    p_corrected: float = math.nan
    family_size: int = 1

    @property
    def moments(self) -> list[str]:
        """Moments in order of appearance."""
        return list(dict.fromkeys(moment for moment, _ in self.points))

    @property
    def budgets(self) -> list[str]:
        """Budgets in ascending order."""
        return sorted({budget for _, budget in self.points}, key=budget_order)

    def is_decided(self, alpha: float) -> bool:
        """Return whether the corrected p-value is below the level and the interval does not contain 0."""
        return self.p_corrected < alpha and (self.change.lo > 0 or self.change.hi < 0)


@dataclass(frozen=True)
class PolicyComparison:
    """Comparison of two policies on one benchmark, with one model, length and seed.

    Attributes:
        model: The model.
        group: The benchmark.
        length: Tokens of prompt and answer.
        seed: Seed of the run.
        unit_scaled: Whether scores lie in [0, 1].
        higher_is_better: Whether a higher score is better.
        metric: The metric; "" if tasks differ in it.
        informed: The policies that see the answer.
        overall: Mean over all tasks, moments and budgets.
        parts: The same per moment and budget, and per task at each; empty if `overall` is a single task at one of them.
        at_chance: Tasks that are left out because the full cache is not above chance.
        unaveraged: Tasks that are left out because their score is not a mean over samples.
        unpaired: Moments and budgets that are left out because a task has no common scores there.
    """

    model: str
    group: str
    length: int
    seed: int
    unit_scaled: bool
    higher_is_better: bool
    metric: str
    informed: frozenset[str]
    overall: PolicyDifference
    parts: tuple[PolicyDifference, ...]
    at_chance: tuple[str, ...] = ()
    unaveraged: tuple[str, ...] = ()
    unpaired: tuple[Point, ...] = ()


def compare_policies(results: Results, base: str, policy: str, *, alpha: float = 0.05) -> list[PolicyComparison]:
    """Compare two policies at the same budgets and moments, question by question.

    Holm's method corrects the p-values in two families: the overall differences, of which there is one per model,
    benchmark, length and seed, and their parts. A difference of 0 in every context cannot raise a false alarm and does
    not count.

    Args:
        results: The results of a run, with samples.
        base: Canonical spelling of the policy to compare with.
        policy: Canonical spelling of the other policy.
        alpha: Level of the tests.

    Raises:
        UserError: A policy was not run, or nothing can be compared.
    """
    check_share("--alpha", alpha, minimum=LEAST_ALPHA)
    for policy_name in (base, policy):
        known_policies = ["full", *results.policies]
        if policy_name not in known_policies:
            hint = nearest(policy_name, results.policies)
            raise UserError(f"{policy_name}: not in this run{hint}; it has {', '.join(known_policies)}")
    if "full" in (base, policy):
        raise UserError("full has no budget; kvbench report compares every policy with the full cache")
    if base == policy:
        raise UserError(f"cannot compare {base} with itself; name two policies")
    cells = results.cells[results.cells["policy"].isin(["full", base, policy])]
    assert results.samples is not None
    draw_count = significance.enough_draws(len(cells), alpha)
    drafts = []
    reasons: dict[str, None] = {}
    for setting_key, setting_cells in cells.groupby(SETTING, sort=False):
        setting = dict(zip(SETTING, setting_key, strict=True))
        try:
            drafts.append(_compare_setting(setting, setting_cells, results.samples, base, policy, draw_count))
        except UserError as error:
            reasons[str(error)] = None
    if not drafts:
        raise UserError("; ".join(reasons))
    return _corrected(drafts)


def _compare_setting(
    setting: dict[str, Any], setting_cells: pd.DataFrame, samples: Samples, base: str, policy: str, draw_count: int
) -> PolicyComparison:
    """Compare the policies on one benchmark, without corrections.

    Raises:
        UserError: Nothing can be compared; the message says why.
    """
    group = str(setting["group"])
    at_chance, unaveraged = tasks_at_chance(setting_cells), unaveraged_tasks(setting_cells)
    ok_cells = setting_cells[(setting_cells["status"] == "ok") & (setting_cells["policy"] != "full")]
    means = tested_cells(setting_cells)
    if len(ok_cells) and not len(means):
        if unaveraged:
            raise UserError(
                f"{group}: the score of {', '.join(unaveraged)} is not a mean over samples, so it has no paired test; "
                "use --metric"
            )
        raise UserError(f"{group}: the full cache is not above chance on any task, so differences are meaningless")
    scales = {unit_scale(task_cells) for _, task_cells in means.groupby("task")}
    if len(scales) > 1 or means["higher_is_better"].nunique() > 1:
        raise UserError(f"{group}: its tasks differ in scale or direction, so they have no mean; choose with --task")
    scores = _PairedScores(means, samples, base, policy, draw_count)
    tasks = tuple(dict.fromkeys(means["task"].astype(str)))
    moments = list(dict.fromkeys(means["moment"].astype(str)))
    all_points = sorted(
        set(zip(means["moment"].astype(str), means["budget"].astype(str), strict=True)),
        key=lambda point: (moments.index(point[0]), budget_order(point[1])),
    )
    points = tuple(point for point in all_points if all(scores.has(task, point) for task in tasks))
    if not points:
        raise UserError(
            f"{group}: {base} and {policy} have no common budget and moment with scores of all tasks at the same seed; "
            "--task chooses tasks"
        )
    unit_scaled = all(scales)

    def difference(part_tasks: Sequence[str], part_points: Sequence[Point]) -> PolicyDifference:
        return scores.difference(tuple(part_tasks), tuple(part_points), is_bounded=unit_scaled)

    parts: list[PolicyDifference] = []
    if len(tasks) > 1 and len(points) > 1:
        parts += [difference(tasks, [point]) for point in points]
    if len(tasks) * len(points) > 1:
        parts += [difference([task], [point]) for task in tasks for point in points]
    return PolicyComparison(
        model=str(setting["model"]),
        group=group,
        length=int(setting["length"]),
        seed=int(setting["seed"]),
        unit_scaled=unit_scaled,
        higher_is_better=bool(means["higher_is_better"].iloc[0]),
        metric=str(means["metric"].iloc[0]) if means["metric"].nunique() == 1 else "",
        informed=frozenset(informed_policies(means)),
        overall=difference(tasks, points),
        parts=tuple(parts),
        at_chance=tuple(at_chance),
        unaveraged=tuple(unaveraged),
        unpaired=tuple(point for point in all_points if point not in points),
    )


def context_totals(gaps: Mapping[str, tuple[stats.Floats, npt.NDArray[np.intp]]]) -> stats.Floats:
    """Return the summed differences of every context, `[contexts]` or `[contexts, columns]`; tasks weigh the same.

    Args:
        gaps: For each task, the differences `[keys]` or `[keys, columns]` and the context of each key, ascending from
            0. With equal numbers of keys, the sums are those of the differences themselves.
    """
    largest_task = max(len(codes) for _, codes in gaps.values())
    task_totals = []
    for task_gaps, codes in gaps.values():
        context_starts = np.searchsorted(codes, np.arange(int(codes.max()) + 1))
        task_totals.append(np.add.reduceat(task_gaps, context_starts, axis=0) * (largest_task / len(codes)))
    return np.concatenate(task_totals)


def tested_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of policies on tasks whose mean can be tested: above chance and a mean over samples."""
    left_out = [*tasks_at_chance(cells), *unaveraged_tasks(cells)]
    return cells[(cells["status"] == "ok") & (cells["policy"] != "full") & ~cells["task"].isin(left_out)]


class _PairedScores:
    """Scores of two policies by task, moment and budget."""

    def __init__(self, cells: pd.DataFrame, samples: Samples, base: str, policy: str, draw_count: int) -> None:
        self._samples, self._policies, self._draw_count = samples, (base, policy), draw_count
        columns = ["policy", "task", "moment", "budget"]
        keys = cells[columns].astype(str).itertuples(index=False, name=None)
        self._cells = dict(zip(keys, cells["cell"].astype(str), strict=True))

    def has(self, task: str, point: Point) -> bool:
        """Return whether the policies have common scores."""
        return len(self._paired(task, (point,))[0]) > 0

    def difference(self, tasks: tuple[str, ...], points: tuple[Point, ...], *, is_bounded: bool) -> PolicyDifference:
        """Return the difference of the means over tasks, moments and budgets; `p` is not corrected."""
        paired = {task: self._paired(task, points) for task in tasks}
        base_score, score = (
            float(np.mean([scores[:, column].mean() for scores, _ in paired.values()])) for column in (0, 1)
        )
        gaps = {task: (scores[:, 1] - scores[:, 0], codes) for task, (scores, codes) in paired.items()}
        change = mean_difference(gaps, is_bounded=is_bounded)
        totals = context_totals(gaps)
        p_value = significance.sign_p(totals, draws=self._draw_count)
        differs = any(task_gaps.any() for task_gaps, _ in gaps.values())
        return PolicyDifference(tasks, points, base_score, score, change, p_value, len(totals), differs)

    def _paired(self, task: str, points: Sequence[Point]) -> tuple[stats.Floats, npt.NDArray[np.intp]]:
        """Return the common scores, averaged over moments and budgets: `[keys, 2]`, and contexts `[keys]`."""
        cell_ids = [self._cells.get((policy, task, *point), "") for policy in self._policies for point in points]
        scores, context_codes = self._samples.wide(cell_ids)
        is_common = np.isfinite(scores).all(axis=1)
        scores = scores[is_common].reshape(-1, 2, len(points)).mean(axis=2)
        return scores, np.unique(context_codes[is_common], return_inverse=True)[1]


def _corrected(comparisons: Sequence[PolicyComparison]) -> list[PolicyComparison]:
    """Return the comparisons with corrected p-values."""
    overall = _holm([comparison.overall for comparison in comparisons])
    parts = iter(_holm([part for comparison in comparisons for part in comparison.parts]))
    return [
        replace(comparison, overall=corrected, parts=tuple(next(parts) for _ in comparison.parts))
        for comparison, corrected in zip(comparisons, overall, strict=True)
    ]


def _holm(differences: Sequence[PolicyDifference]) -> list[PolicyDifference]:
    """Return differences with p-values corrected as one family, without those in which no score differs."""
    tested = [difference for difference in differences if difference.differs]
    corrected = dict(zip(map(id, tested), significance.holm([difference.p for difference in tested]), strict=True))
    return [
        replace(difference, p_corrected=corrected.get(id(difference), 1.0), family_size=len(tested))
        for difference in differences
    ]
