"""Optional packages that only some tasks need, and how to install them."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from kvbench.benchmark import Benchmark

LMMS_EVAL = "pip install 'kvbench[vision]' && pip install --no-deps lmms-eval==0.7.3"
"""lmms-eval's own requirements would replace torch and transformers."""

OPENCV = "pip install 'kvbench[vision]'"


def provide_latex2sympy2() -> None:
    """Make `from latex2sympy2 import latex2sympy` work for lmms-eval's math tasks.

    That package does not run with the antlr4 of math-verify, which has the same function.
    """
    if "latex2sympy2" not in sys.modules:
        from latex2sympy2_extended.latex2sympy2 import latex2sympy

        module = ModuleType("latex2sympy2")
        module.latex2sympy = latex2sympy  # type: ignore[attr-defined]
        sys.modules["latex2sympy2"] = module


def lacking(benchmark: Benchmark) -> str:
    """Return what a benchmark lacks and how to install it; "" if nothing is missing."""
    if benchmark.harness == "lmms_eval" and importlib.util.find_spec("lmms_eval") is None:
        return f"needs lmms-eval, which is not installed; run `make vision`, or: {LMMS_EVAL}"
    if "video" in benchmark.media and importlib.util.find_spec("cv2") is None:
        return f"needs opencv, which is not installed; run `make vision`, or: {OPENCV}"
    return ""
