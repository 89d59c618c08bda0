"""Rank correlations of two runs, against Spearman's formula."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from benchmarks.rank_agreement import agreement, correlations, published_agreement
from kvbench.papers.published.results import FIELDS, Figure


def run(order: list[float], questions: int = 30) -> pd.DataFrame:
    """Samples in which policy i is right on `order[i]` of the contexts of each of two tasks."""
    rows = [
        (task, f"p{i}", "context", "0.2", f"{task}{n}", float(n < share * questions))
        for task in "ab"
        for i, share in enumerate(order)
        for n in range(questions)
    ]
    return pd.DataFrame(rows, columns=["task", "policy", "moment", "budget", "context_id", "score"])


def test_the_correlation_is_spearmans() -> None:
    a, b = np.array([[3.0, 1.0, 4.0, 2.0, 5.0]]), np.array([[1.0, 3.0, 2.0, 5.0, 4.0]])
    gaps = np.array([2.0, -2.0, 2.0, -3.0, 1.0])
    by_hand = 1 - 6 * (gaps**2).sum() / (5 * 24)
    assert correlations(a, b)[0] == pytest.approx(by_hand)
    assert np.isnan(correlations(a, np.ones((1, 5)))[0])


def test_equal_and_opposite_orders() -> None:
    up, down = run([0.1, 0.4, 0.7, 0.9]), run([0.9, 0.7, 0.4, 0.1])
    (same,) = agreement(up, up).itertuples()
    assert same.rho == pytest.approx(1)
    assert same.policies == 4
    (opposite,) = agreement(up, down).itertuples()
    assert opposite.rho == pytest.approx(-1)
    assert opposite.hi < 0


def test_few_questions_give_a_wide_interval() -> None:
    few, many = (agreement(run(o, n), run(o, n)) for o, n in [([0.4, 0.5, 0.6], 10), ([0.4, 0.5, 0.6], 400)])
    assert few.lo[0] < many.lo[0]


def test_policies_and_tasks_of_only_one_run_do_not_count() -> None:
    one = run([0.1, 0.5, 0.9])
    other = pd.concat([run([0.1, 0.5, 0.9, 0.2]), one.assign(task="c", score=0.0)])
    (row,) = agreement(one, other).itertuples()
    assert row.policies == 3
    assert row.rho == pytest.approx(1)


def figure(policy: str, value: float, **more: str) -> Figure:
    known = {"fraction": "0.2", "setting": "question-agnostic", "metric": "score"} | more
    return Figure(**dict.fromkeys(FIELDS, "") | known | {"policy": policy, "value": str(value)})


def test_published_scores_rank_the_policies_of_a_run_that_they_name() -> None:
    samples = run([0.1, 0.4, 0.7, 0.9])
    printed = [figure("p0", 3), figure("p1", 20), figure("p2", 30), figure("elsewhere", 1)]
    (row,) = published_agreement(samples, printed).itertuples()
    assert (row.moment, row.budget, row.policies) == ("context", "0.2", 3)
    assert row.rho == pytest.approx(1)
    (row,) = published_agreement(samples, [*printed, figure("p0", 99)]).itertuples()
    assert row.rho == pytest.approx(-0.5), "two scores of a policy are averaged"


def test_published_figures_of_other_budgets_moments_and_metrics_do_not_count() -> None:
    samples = run([0.1, 0.9])
    for more in ({"fraction": "0.3"}, {"setting": "question-aware"}, {"metric": "ms"}):
        figures = [figure("p0", 1, **more), figure("p1", 2, **more)]
        assert published_agreement(samples, figures).empty
