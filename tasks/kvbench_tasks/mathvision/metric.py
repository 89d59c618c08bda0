"""MATH-Vision's scorers, following the authors and lmms-eval.

Both comparisons run in a separate process, because they evaluate the response, and a power of large integers may never
finish.
"""

from __future__ import annotations

import atexit
import importlib.util
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc
from kvbench_tasks.maths.verifier import Verifier


def _official() -> Path:
    return Path(__file__).parent / "equal.py"


def _lmms_eval() -> Path:
    module_spec = importlib.util.find_spec("lmms_eval")
    assert module_spec is not None
    assert module_spec.submodule_search_locations is not None
    return Path(module_spec.submodule_search_locations[0], "tasks", "mathvision", "eval_utils.py")


EQUAL = Verifier(function=_official)
LMMS_EQUAL = Verifier(function=_lmms_eval)
atexit.register(EQUAL.close)
atexit.register(LMMS_EQUAL.close)


def process_results(doc: Doc, results: list[str]) -> dict[str, Any]:
    """Score a response like the authors' evaluation; called by lmms-eval."""
    return _score_response(EQUAL, doc, results)


def process_results_lmms_eval(doc: Doc, results: list[str]) -> dict[str, Any]:
    """Score a response like lmms-eval; called by it."""
    return _score_response(LMMS_EQUAL, doc, results)


def _score_response(is_equal: Verifier, doc: Doc, results: list[str]) -> dict[str, Any]:
    # lmms-eval extracts the answer exactly as the authors do.
    from lmms_eval.tasks.mathvision import utils

    utils.is_equal = is_equal
    metrics: dict[str, Any] = utils.mathvision_process_results(doc, results)
    return metrics
