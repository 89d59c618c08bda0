"""The packages that only some tasks need, and how to install them."""

from __future__ import annotations

import importlib.util

from kvbench.benchmark import Benchmark

LMMS_EVAL = "pip install 'kvbench[vision]' && pip install --no-deps lmms-eval==0.7.3"
"""lmms-eval's own requirements would replace torch and transformers."""

OPENCV = "pip install 'kvbench[vision]'"


def lacking(bench: Benchmark) -> str:
    """What a benchmark needs that is not installed, and what to do; "" if nothing is missing."""
    if bench.harness == "lmms_eval" and importlib.util.find_spec("lmms_eval") is None:
        return f"needs lmms-eval, which is not installed; run `make vision`, or: {LMMS_EVAL}"
    if "video" in bench.media and importlib.util.find_spec("cv2") is None:
        return f"needs opencv, which is not installed; run `make vision`, or: {OPENCV}"
    return ""
