"""CoQA's exact match and F1 over several annotators (arXiv:1808.07042, section 6.1)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvbench.metrics import exact_match, f1


def scores(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Compute exact match and F1 of the response's first line; called by lm-eval.

    Each of the n reference answers is left out in turn, and the best score over the others counts; the result is the
    mean of these n scores, as for human annotators. F1 of two texts without words is 1.
    """
    first_line = results[0].strip().split("\n")[0]
    words_f1 = functools.partial(f1, both_empty=1.0)
    return {
        "em": _mean(exact_match, first_line, doc["outputs"]),
        "f1": _mean(words_f1, first_line, doc["outputs"]),
    }


def _mean(metric: Callable[[str, str], float], response: str, answers: list[str]) -> float:
    answer_scores = [metric(response, answer) for answer in answers]
    if len(answer_scores) == 1:
        return answer_scores[0]
    best_scores = [max(answer_scores[:index] + answer_scores[index + 1 :]) for index in range(len(answer_scores))]
    return sum(best_scores) / len(best_scores)
