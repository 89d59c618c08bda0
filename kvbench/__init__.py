"""kvbench: one benchmark for KV-cache eviction, policy x budget x model x task.

Public names are loaded on first use, so that `import kvbench` is fast.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

from kvbench import moved
from kvbench.engine import lazy_dynamo, lean_transformers, torchvision_build

if TYPE_CHECKING:
    from kvbench.budget import Budget
    from kvbench.engine.session import attach, kept
    from kvbench.runs.load import load
    from kvbench.runs.runner import run
    from kvbench.spelling import policy

__version__ = "0.1.0"

__all__ = ["Budget", "__version__", "attach", "kept", "load", "policy", "run"]

# Before anything imports transformers.
lazy_dynamo.install()
lean_transformers.install()
torchvision_build.install()
moved.install()

_HOMES = {
    "Budget": "kvbench.budget",
    "attach": "kvbench.engine.session",
    "kept": "kvbench.engine.session",
    "load": "kvbench.runs.load",
    "policy": "kvbench.spelling",
    "run": "kvbench.runs.runner",
}


def __getattr__(attribute: str) -> Any:
    if attribute in _HOMES:
        is_collecting = gc.isenabled()
        gc.disable()  # these imports leave no garbage, and looking for it would take a tenth of their time
        try:
            return getattr(importlib.import_module(_HOMES[attribute]), attribute)
        finally:
            if is_collecting:
                gc.enable()
    raise AttributeError(f"module 'kvbench' has no attribute {attribute!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
