"""The packages that only some tasks need, and how to install them."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from kvbench.benchmark import Benchmark

LMMS_EVAL = "pip install 'kvbench[vision]' && pip install --no-deps lmms-eval==0.7.3"
"""lmms-eval's own requirements would replace torch and transformers."""

OPENCV = "pip install 'kvbench[vision]'"


def provide_latex2sympy2() -> None:
    """Make `from latex2sympy2 import latex2sympy` work, which lmms-eval's mathematics wants.

    That package does not run with the antlr4 of math-verify; the function is the same in another.
    """
    if "latex2sympy2" not in sys.modules:
        from latex2sympy2_extended.latex2sympy2 import latex2sympy

        module = ModuleType("latex2sympy2")
        module.latex2sympy = latex2sympy  # type: ignore[attr-defined]
        sys.modules["latex2sympy2"] = module


def lacking(benchmark: Benchmark) -> str:
    """What a benchmark needs that is not installed, and what to do; "" if nothing is missing."""
    if benchmark.harness == "lmms_eval" and importlib.util.find_spec("lmms_eval") is None:
        return f"needs lmms-eval, which is not installed; run `make vision`, or: {LMMS_EVAL}"
    if "video" in benchmark.media and importlib.util.find_spec("cv2") is None:
        return f"needs opencv, which is not installed; run `make vision`, or: {OPENCV}"
    return ""
