"""Reports of runs: Pareto fronts, heat maps, tables and a summary.

Public names are loaded on first use, so that a command that only prints a table need not load pandas and matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.report.overall import group_means
    from kvbench.report.rendering import render
    from kvbench.report.terminal import run_table

__all__ = ["group_means", "render", "run_table"]

_HOMES = {
    "group_means": "kvbench.report.overall",
    "render": "kvbench.report.rendering",
    "run_table": "kvbench.report.terminal",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvbench.report' has no attribute {name!r}")
