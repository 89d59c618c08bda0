"""Settings with which the gates that ship for the reference model were trained.

    kvbench train gates --model reference --policy trimkv

uses them, and `python -m scripts.reference_model.gates` in a checkout trains all of them again.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {"length": 384, "lr": 2e-3, "log_steps": 5}
"""Ten times the papers' learning rate, because these trainings take minutes instead of days."""

RECIPES: dict[str, dict[str, Any]] = {
    "trimkv": {**_COMMON, "steps": 240, "capacity": 48},
    "dbtrimkv": {**_COMMON, "steps": 160, "capacity": 48, "bias": 8.0},
    "locret": {**_COMMON, "steps": 160},
}
"""By policy; other settings are the defaults."""
