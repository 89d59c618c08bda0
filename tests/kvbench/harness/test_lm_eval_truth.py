"""Scores of tasks by name against lm-eval's own evaluation; `benchmarks/lm_eval_truth.py` compares many more."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from benchmarks.lm_eval_cases import QUICK, Case
from benchmarks.lm_eval_truth import Models, Outcome, compared, comparisons, line, quiet

KINDS = {"multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"}


def test_a_dozen_tasks_score_as_in_lm_eval(tmp_path: Path) -> None:
    with quiet():
        found = [*comparisons(QUICK, Models(tmp_path))]
    assert [difference for comparison in found for difference in comparison.differences] == []
    assert {comparison.kinds for comparison in found} == KINDS
    assert all(comparison.documents and comparison.metrics for comparison in found)
    assert sum(comparison.likelihoods for comparison in found) > 150
    assert sum(comparison.texts for comparison in found) > 20


CHOICES, ANSWERS = Case("choices"), Case("answers")
OUTCOMES = {
    "choices": Outcome(
        responses={"choices": {0: [[-3.5, False], [-2.0, True]], 1: [[-1.0, False], [-9.0, False]]}},
        values={"choices": {0: {"acc,": 1.0}, 1: {"acc,": 0.0}}},
        metrics={("choices", "acc", ""): 0.5, ("a group", "acc", ""): 0.5},
        kinds={"multiple_choice"},
    ),
    "answers": Outcome(
        responses={"answers": {0: [["seven", "seven"]]}},
        values={"answers": {0: {"exact_match,strict": 0.0, "exact_match,flexible": 1.0}}},
        metrics={("answers", "exact_match", "strict"): 0.0, ("answers", "exact_match", "flexible"): 1.0},
        kinds={"generate_until"},
    ),
}


def _ours() -> dict[str, Outcome]:
    """Return what kvbench finds if it agrees with `OUTCOMES`."""
    ours = copy.deepcopy(OUTCOMES)
    ours["a group"] = Outcome(metrics={("a group", "acc", ""): ours["choices"].metrics.pop(("a group", "acc", ""))})
    ours["answers"].responses["answers"][0] = [["seven"]]  # greedy answers are generated once
    return ours


@pytest.mark.parametrize("case", [CHOICES, ANSWERS])
def test_equal_results_are_called_equal(case: Case) -> None:
    found = compared(case, OUTCOMES[case.task], _ours())
    assert found.differences == []
    assert line(found).endswith("| equal |")


def _changed_likelihood(ours: dict[str, Outcome]) -> None:
    ours["choices"].responses["choices"][0][0][0] -= 2e-4


def _changed_greedy(ours: dict[str, Outcome]) -> None:
    ours["choices"].responses["choices"][0][1][1] = False


def _missing_request(ours: dict[str, Outcome]) -> None:
    ours["choices"].responses["choices"][0].pop()


def _missing_document(ours: dict[str, Outcome]) -> None:
    del ours["choices"].responses["choices"][1]


def _missing_group(ours: dict[str, Outcome]) -> None:
    del ours["a group"]


def _missing_number(ours: dict[str, Outcome]) -> None:
    ours["choices"].metrics["choices", "acc", ""] = float("nan")


def _missing_value(ours: dict[str, Outcome]) -> None:
    ours["choices"].values["choices"][0] = {}


def _further_metric(ours: dict[str, Outcome]) -> None:
    ours["choices"].metrics["choices", "acc_norm", ""] = 0.5


@pytest.mark.parametrize(
    "change",
    [
        _changed_likelihood,
        _changed_greedy,
        _missing_request,
        _missing_document,
        _missing_group,
        _missing_number,
        _further_metric,
        _missing_value,
    ],
)
def test_a_difference_in_likelihoods_is_shown(change: object) -> None:
    ours = _ours()
    assert callable(change)
    change(ours)
    found = compared(CHOICES, OUTCOMES["choices"], ours)
    assert len(found.differences) == 1
    assert line(found).endswith("| **1 differ** |")


def test_a_difference_in_answers_is_shown() -> None:
    ours = _ours()
    ours["answers"].responses["answers"][0] = [["seven", "eight"]]
    del ours["answers"].metrics["answers", "exact_match", "strict"]
    found = compared(ANSWERS, OUTCOMES["answers"], ours)
    assert found.differences == [
        "answers, document 0, request 0: ['seven', 'seven'], kvbench ['seven', 'eight']",
        "answers exact_match strict: 0.0, kvbench None",
    ]
