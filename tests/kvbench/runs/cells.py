"""Cells for tests, from plain values."""

from __future__ import annotations

from typing import Any

import kvbench
from kvbench.budget import Budget
from kvbench.moments import Timing
from kvbench.runs.cell import Cell, CellVariant

USUAL: dict[str, Any] = {
    "model": "m",
    "model_revision": "r",
    "task": "vt",
    "group": "ruler",
    "length": 1024,
    "seed": 0,
    "dtype": "float32",
    "device": "cpu",
    "attention": "sdpa",
    "chat_template": "",
    "data_hash": "d",
    "task_version": "1",
    "prompts": "p1",
}


def make_cell(
    policy: str = "snapkv",
    budget: str = "0.2",
    moment: str = "context",
    versions: dict[str, str] | None = None,
    **changes: Any,
) -> Cell:
    """A cell whose versions do not depend on what is installed."""
    timing = Timing.parse(moment) if moment else None
    variant = CellVariant(kvbench.policy(policy), Budget.parse(budget), timing)
    cell = Cell(variant=variant, **{**USUAL, **changes})
    cell.__dict__["versions"] = {"torch": "2"} if versions is None else versions
    return cell
