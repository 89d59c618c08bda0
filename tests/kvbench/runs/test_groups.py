"""Scores of groups of tasks equal lm-eval's, and combine the uncertainty of their tasks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from lm_eval.api.group import Group
from lm_eval.config.group import AggMetricConfig

from kvbench.harness.protocol import GroupMetric, LoadedTask, TaskGroup
from kvbench.runs.groups import group_rows

SETTING = {"model": "m", "length": 0, "seed": 0, "policy": "p", "budget": "0.2", "moment": "context"}


class Task(LoadedTask):
    def score_metrics(self, *_: Any) -> Any:
        raise NotImplementedError


def task(name: str, *groups: TaskGroup) -> Task:
    return Task(name, "g", "1", "d", "acc", True, 0.0, 0, (), groups=groups)


def row(task_name: str, score: float, metric: str = "acc", filter_name: str = "", **changes: Any) -> dict[str, Any]:
    scores = {"score": score, "score_se": 0.1, "score_lo": score - 0.2, "score_hi": score + 0.3, "full_score": 0.5}
    differences = {"diff": score - 0.5, "diff_lo": score - 0.6, "diff_hi": score - 0.3}
    return {
        "cell": f"{task_name}-{changes.get('policy', 'p')}", "task": task_name, "metric": metric, "filter": filter_name,
        "higher_is_better": True, "is_mean": True, **SETTING, **scores, **differences, **changes,
    }  # fmt: skip


class _Leaf:
    def __init__(self, name: str) -> None:
        self.task_name = name


def lm_evals(by_size: bool, filters: list[str] | None, results: dict[str, Any]) -> dict[str, float]:
    """The scores of lm-eval's own group."""
    group = Group(
        "g", aggregate_metric_list=[AggMetricConfig(metric="acc", weight_by_size=by_size, filter_list=filters)]
    )
    group.get_all_tasks = lambda recursive=True: [_Leaf(name) for name in results]  # type: ignore[method-assign]
    return {key: value for key, value in group.aggregate(results).items() if key.startswith("acc,")}


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize("filters", [None, ("strict",)])
def test_the_score_is_lm_evals(by_size: bool, filters: tuple[str, ...] | None) -> None:
    group = TaskGroup("g", ("a", "b", "c"), (GroupMetric("acc", filters, by_size),))
    tasks = [task(name, group) for name in group.tasks]
    metric_rows = [
        row("a", 0.1),
        row("a", 0.2, filter_name="strict"),
        row("b", 0.9),
        row("c", 0.4, filter_name="strict"),
    ]
    cell_rows = [{"cell": f"{name}-p", "samples": size} for name, size in (("a", 1), ("b", 3), ("c", 8))]
    found = {f"acc,{entry['filter'] or 'none'}": entry["score"] for entry in group_rows(tasks, cell_rows, metric_rows)}
    results = {
        "a": {"acc,none": 0.1, "acc,strict": 0.2, "sample_len": 1},
        "b": {"acc,none": 0.9, "sample_len": 3},
        "c": {"acc,strict": 0.4, "sample_len": 8},
    }
    assert found == pytest.approx(lm_evals(by_size, None if filters is None else [*filters], results))


def test_uncertainty_is_combined_as_of_independent_tasks() -> None:
    group = TaskGroup("g", ("a", "b"), (GroupMetric("acc", None, True),))
    cells = [{"cell": "a-p", "samples": 1}, {"cell": "b-p", "samples": 3}]
    (found,) = group_rows([task("a", group), task("b", group)], cells, [row("a", 0.2), row("b", 0.6)])
    assert (found["cell"], found["task"], found["score"]) == ("", "g", pytest.approx(0.5))
    assert found["score_se"] == pytest.approx(math.hypot(0.25 * 0.1, 0.75 * 0.1))
    assert found["score_hi"] - found["score"] == pytest.approx(math.hypot(0.25 * 0.3, 0.75 * 0.3))
    assert found["diff"] == pytest.approx(0.0) and found["diff_hi"] == pytest.approx(math.hypot(0.25 * 0.2, 0.75 * 0.2))


def test_a_group_has_a_score_only_where_all_of_its_tasks_have_one() -> None:
    group = TaskGroup("g", ("a", "b"), (GroupMetric("acc", None, True),))
    cells = [{"cell": f"{name}-{policy}", "samples": 2} for name in "ab" for policy in "pq"]
    rows = [row("a", 0.2), row("b", 0.6), row("a", 0.1, policy="q")]
    assert [entry["policy"] for entry in group_rows([task("a", group)], cells, rows)] == ["p"]
    failed = [*rows, row("b", math.nan, policy="q")]
    scores = {entry["policy"]: entry["score"] for entry in group_rows([task("a", group)], cells, failed)}
    assert scores["p"] == pytest.approx(0.4) and math.isnan(scores["q"])
