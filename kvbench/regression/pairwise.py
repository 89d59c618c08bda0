"""All policies of a run against each other at the same budget, as data of the HTML page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvbench.regression import significance
from kvbench.regression.policies import context_totals, tested_cells
from kvbench.report.frames import Results, budget_order
from kvbench.report.overall import mean_differences
from kvbench.report.panel import Panel, panels
from kvbench.report.sorted_samples import Samples

MOST_TESTS = 12_000
"""Maximum number of comparisons in a page: some seconds, and less than 1 MB."""

_Pair: TypeAlias = tuple[str, str]
_Test: TypeAlias = dict[str, Any]


def policy_pairs(results: Results) -> list[dict[str, Any]]:
    """Return the paired differences of all pairs of policies, one record per panel, JSON-serialisable.

    Every difference and p-value is that of `compare_policies` at one budget and moment, on the mean over the tasks of
    the panel. Holm's method corrects p for all comparisons of a panel that have the same base policy, over all budgets;
    so each pair has two corrected values, one for either policy as the base.

    Args:
        results: The results of runs, with samples.

    Returns:
        `model`, `group`, `length`, `moment`, `seed`, `tasks` (their number) and `tests`: lists of budget, base, policy,
        difference (policy minus base), its lower and upper end, corrected p with `base` and with `policy` as the base,
        and contexts. Panels beyond `MOST_TESTS` comparisons have None instead of `tests`.
    """
    panel_records = []
    remaining_tests = MOST_TESTS
    for panel in panels(results):
        cells = tested_cells(panel.cells)
        tests: list[_Test] | None = None
        if _pair_count(cells) <= remaining_tests and results.samples is not None:
            tests = list(_panel_tests(panel, cells, results.samples))
            remaining_tests -= len(tests)
            _correct(tests)
        panel_records.append(
            {
                "model": panel.model,
                "group": panel.group,
                "length": panel.variant.length,
                "moment": panel.variant.moment,
                "seed": panel.variant.seed,
                "tasks": int(cells["task"].nunique()),
                "tests": None if tests is None else [_row(test) for test in tests],
            }
        )
    return panel_records


def _pair_count(cells: pd.DataFrame) -> int:
    return sum(math.comb(count, 2) for count in cells.groupby("budget")["policy"].nunique())


def _panel_tests(panel: Panel, cells: pd.DataFrame, samples: Samples) -> Iterator[_Test]:
    """Yield the tests of a panel, without corrections; none if its tasks have no mean."""
    tasks = list(dict.fromkeys(cells["task"].astype(str)))
    scales = {bool(scores.between(0, 1).all()) for _, scores in cells.groupby("task")["score"]}
    if len(scales) != 1 or cells["higher_is_better"].nunique() != 1:
        return
    draw_count = significance.enough_draws(_pair_count(cells), significance.LEVEL)
    for budget in sorted(set(cells["budget"].astype(str)), key=budget_order):
        at_budget = cells[cells["budget"] == budget].drop_duplicates(["policy", "task"], keep="last")
        table = at_budget.pivot(index="policy", columns="task", values="cell")
        complete = [policy for policy in dict.fromkeys(at_budget["policy"]) if table.loc[policy].notna().all()]
        scores = {task: samples.wide(map(str, table.loc[complete, task])) for task in tasks}
        for pairs, common in _by_common_keys(complete, {task: np.isfinite(scores[task][0]) for task in tasks}):
            gaps = {}
            for task, keys in common.items():
                columns = [[complete.index(pair[side]) for pair in pairs] for side in (0, 1)]
                task_scores, context_codes = (
                    scores[task][0][keys],
                    np.unique(scores[task][1][keys], return_inverse=True)[1],
                )
                gaps[task] = (task_scores[:, columns[1]] - task_scores[:, columns[0]], context_codes)
            totals = context_totals(gaps)
            means = mean_differences(gaps, is_bounded=all(scales))
            for index, (base, policy) in enumerate(pairs):
                mean, lower, upper = (float(bound[index]) for bound in means)
                yield {
                    "budget": budget,
                    "base": base,
                    "policy": policy,
                    "change": (mean, lower, upper),
                    "p": significance.sign_p(totals[:, index], draws=draw_count),
                    "differs": any(task_gaps[:, index].any() for task_gaps, _ in gaps.values()),
                    "contexts": len(totals),
                }


def _by_common_keys(
    policies: list[str], present: dict[str, np.ndarray[Any, np.dtype[np.bool_]]]
) -> Iterator[tuple[list[_Pair], dict[str, np.ndarray[Any, np.dtype[np.bool_]]]]]:
    """Yield the pairs of policies that have common scores of every task, with the keys that both have, by task.

    Pairs with the same keys come together, because their intervals share the draws.
    """
    groups: dict[bytes, list[_Pair]] = defaultdict(list)
    commons = {}
    for (a, base), (b, policy) in combinations(enumerate(policies), 2):
        common = {task: mask[:, a] & mask[:, b] for task, mask in present.items()}
        if all(keys.any() for keys in common.values()):
            group_key = b"".join(keys.tobytes() for keys in common.values())
            groups[group_key].append((base, policy))
            commons[group_key] = common
    for group_key, pairs in groups.items():
        yield pairs, commons[group_key]


def _correct(tests: list[_Test]) -> None:
    """Add the corrected p-values of every test: with either policy as the base."""
    families: dict[str, list[_Test]] = defaultdict(list)
    for test in tests:
        test["corrected"] = {test["base"]: 1.0, test["policy"]: 1.0}
        if test["differs"]:  # a difference of 0 in every context cannot raise a false alarm
            families[test["base"]].append(test)
            families[test["policy"]].append(test)
    for base, family in families.items():
        for test, p_value in zip(family, significance.holm([test["p"] for test in family]), strict=True):
            test["corrected"][base] = p_value


def _row(test: _Test) -> list[Any]:
    change = [float(f"{value:.6g}") if math.isfinite(value) else None for value in test["change"]]
    corrected = [float(f"{test['corrected'][policy]:.4g}") for policy in (test["base"], test["policy"])]
    return [test["budget"], test["base"], test["policy"], *change, *corrected, test["contexts"]]
