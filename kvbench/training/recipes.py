"""How the gates that ship with kvbench were trained: settings for the reference model.

    kvbench train gates --model reference --policy trimkv

takes them, and `python -m kvbench.training.ship` makes all of them anew.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {"length": 384, "lr": 2e-3, "log_steps": 5}
"""Ten times the papers' learning rate: a gate of a tiny model has minutes, and not days."""

RECIPES: dict[str, dict[str, Any]] = {
    "trimkv": {**_COMMON, "steps": 240, "capacity": 48},
    "dbtrimkv": {**_COMMON, "steps": 160, "capacity": 48, "bias": 8.0},
    "locret": {**_COMMON, "steps": 160},
}
"""By policy; what is not here is the default."""
