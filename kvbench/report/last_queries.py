"""Policies that cannot know yet what will be asked: they rate entries by the last queries of a prompt."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from kvbench.errors import UserError
from kvbench.plugin_facts import PluginFacts
from kvbench.report.frames import Results, unit_scale

_LOW = 0.5
"""Fraction of the full cache's score below which a score looks like a fault."""


class LowBeforeQuestion(NamedTuple):
    """Policies that look broken before the question, and what helps.

    Attributes:
        policies: Policies that rate entries by the last queries and lose most of the score before the question.
        after: Mean score of each of them after the question, if it was run there and scores are in [0, 1].
        better: The policy with the best mean score before the question, if it is above theirs and does not rate by the
            last queries. No informed policy.
    """

    policies: list[str]
    after: dict[str, float]
    better: str | None


def low_before_question(results: Results) -> LowBeforeQuestion:
    """Return policies that rate entries by the prompt's last queries, and lose most of the score before the question.

    Only tasks on which the full cache is above chance count, and only differences whose interval does not contain 0.
    """
    cells = results.cells
    is_counted = (cells["status"] == "ok") & (cells["policy"] != "full") & ~cells["informed"].astype(bool)
    for column in ("is_mean", "higher_is_better", "discriminative"):
        is_counted &= cells[column].astype(bool)
    rows_before = cells[is_counted & (cells["moment"] == "context")]
    means_before = _means(rows_before)
    means_after = _means(cells[is_counted & (cells["moment"] == "question")])
    better_policy = None
    with PluginFacts() as facts:
        low_policies = [
            policy_name
            for policy_name, rows in rows_before.groupby(rows_before["policy"].astype(str), sort=False)
            if rows["score"].sum() < _LOW * rows["full_score"].sum()
            and (rows["diff_hi"] < 0).any()
            and _reads_last_queries(facts, policy_name)
        ]
        if low_policies:
            best_policy = max(means_before, key=means_before.__getitem__)
            is_above = means_before[best_policy] > max(means_before[policy_name] for policy_name in low_policies)
            if is_above and not _reads_last_queries(facts, best_policy):
                better_policy = best_policy
    after = {name: means_after[name] for name in low_policies if name in means_after and unit_scale(rows_before)}
    return LowBeforeQuestion(low_policies, after, better_policy)


def _means(rows: pd.DataFrame) -> dict[str, float]:
    """Return the mean score of every policy over tasks, budgets and whatever else differs."""
    means = rows.groupby(rows["policy"].astype(str), sort=False)["score"].mean()
    return {str(policy_name): float(mean_score) for policy_name, mean_score in means.items()}


def _reads_last_queries(facts: PluginFacts, policy_name: str) -> bool:
    """Return whether a policy's score reads the last queries; False if the policy is not installed."""

    def needs_queries() -> bool:
        from kvbench.plugin import Queries
        from kvbench.spelling import policy

        try:
            score = policy(policy_name).score
        except UserError:
            return False
        return score is not None and any(isinstance(need, Queries) for need in score.needs)

    return bool(facts.get_of_policy(policy_name, "last queries read by", needs_queries))
