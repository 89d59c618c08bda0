"""CoQA's exact match and F1 over several annotators (arXiv:1808.07042, section 6.1)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvbench.metrics import exact_match, f1


def scores(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Exact match and F1 of the response's first line; called by lm-eval.

    Each of the n reference answers is left out in turn, and the best score over the others counts;
    the result is the mean of these n scores. Human annotators are scored against each other in the
    same way. Of two texts without words, F1 is 1.
    """
    said = results[0].strip().split("\n")[0]
    words_f1 = functools.partial(f1, both_empty=1.0)
    return {
        "em": _mean(exact_match, said, doc["outputs"]),
        "f1": _mean(words_f1, said, doc["outputs"]),
    }


def _mean(metric: Callable[[str, str], float], said: str, answers: list[str]) -> float:
    found = [metric(said, answer) for answer in answers]
    if len(found) == 1:
        return found[0]
    rest = [max(found[:i] + found[i + 1 :]) for i in range(len(found))]
    return sum(rest) / len(rest)
