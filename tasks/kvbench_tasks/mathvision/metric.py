"""lmms-eval's scorer of MATH-Vision, with its comparison of expressions in a process of its own.

The comparison evaluates what the response says, and a power of large integers may never end.
"""

from __future__ import annotations

import atexit
import importlib.util
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc
from kvbench_tasks.maths.verifier import Verifier


def _comparison() -> Path:
    spec = importlib.util.find_spec("lmms_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "tasks", "mathvision", "eval_utils.py")


EQUAL = Verifier(function=_comparison)
atexit.register(EQUAL.close)


def process_results(doc: Doc, results: list[str]) -> dict[str, Any]:
    """Score a response as lmms-eval does; called by it."""
    from lmms_eval.tasks.mathvision import utils

    utils.is_equal = EQUAL
    found: dict[str, Any] = utils.mathvision_process_results(doc, results)
    return found
