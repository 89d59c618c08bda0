"""lm-eval's metrics of `truthfulqa_gen`: similarity to true and to false references."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from kvbench.errors import UserError


@lru_cache(maxsize=1)
def _lm_eval() -> Any:
    try:
        return import_module("lm_eval.tasks.truthfulqa.utils")
    except ImportError as error:
        raise UserError(
            f"truthfulqa_gen needs {error.name or 'a package'}, which lm-eval's metrics use; "
            f"run pip install {error.name}"
        ) from error


def prepared(record: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a raw row for lm-eval's metrics: end answers with full stops, drop blank ones."""
    prepared_record: dict[str, Any] = _lm_eval().preprocess_function(record)
    return prepared_record


def scores(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Compute BLEU and ROUGE against the references; called by lm-eval.

    `*_max` is the best score (0 to 100) over the true references, `*_diff` its difference from the best over the false
    ones, and `*_acc` is 1 if the difference is positive.
    """
    metrics = _lm_eval().process_results_gen(doc, results)
    return {metric_name: float(value) for metric_name, value in metrics.items()}
