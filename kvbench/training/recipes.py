"""Training settings of the gates that ship with kvbench, by model and policy.

    kvbench train gates --model smollm2 --policy trimkv

uses them; `python -m scripts.gates` in a checkout retrains all gates of a model.
"""

from __future__ import annotations

from typing import Any

Recipe = dict[str, Any]
"""Settings by name, plus the keys in `OUTSIDE`; missing settings have their defaults."""

OUTSIDE = ("data", "dtype")
"""Keys of a recipe that are not settings."""

_REFERENCE: Recipe = {"data": "reference", "length": 384, "lr": 2e-3, "log_steps": 5}
"""Ten times the papers' learning rate, because these runs take minutes instead of days (`lococo`: the authors'
rate).
"""

_SMOLLM2: Recipe = {
    "data": "chats",
    "dtype": "bfloat16",
    "length": 448,
    "lr": 2e-3,
    "accumulate": 1,
    "log_steps": 5,
    "save_steps": 30,
    "half": True,
}
"""Narrow gates in half precision, at most 4 MB. bfloat16 halves the time on CPUs with native support. Blocks have 16
entries instead of the paper's 64, because contexts of a few hundred tokens have few blocks of 64.
"""

_REFERENCE_VL: Recipe = {
    "data": "shapes_vqa,shapes_dialogue",
    "length": 400,
    "lr": 2e-3,
    "log_steps": 5,
}
"""Samples of the model's own tasks with seeds that no evaluation uses."""

RECIPES: dict[str, dict[str, Recipe]] = {
    "reference": {
        "trimkv": {**_REFERENCE, "steps": 240, "capacity": 48},
        "dbtrimkv": {**_REFERENCE, "steps": 160, "capacity": 48, "bias": 8.0},
        "locret": {**_REFERENCE, "steps": 160},
        "kvzap": {
            **_REFERENCE,
            "lr": 5e-3,
            "steps": 4096,
            "passes": 8,
            "hidden_dim": 64,
            "bias": -1.5,
            "log_steps": 128,
        },
        "lococo": {**_REFERENCE, "steps": 320, "lr": 5e-2, "capacity": 64, "chunk": 128},
        "seerattn_r": {**_REFERENCE, "steps": 160, "block": 16},
    },
    "reference-vl": {
        "trimkv": {**_REFERENCE_VL, "steps": 1000, "capacity": 20},
        "dbtrimkv": {**_REFERENCE_VL, "steps": 1000, "capacity": 20, "bias": 8.0},
    },
    "smollm2": {
        "trimkv": {**_SMOLLM2, "steps": 450, "capacity": 80, "hidden_dim": 96},
        "dbtrimkv": {**_SMOLLM2, "steps": 100, "capacity": 80, "bias": 8.0, "hidden_dim": 80},
        "locret": {**_SMOLLM2, "steps": 150, "hidden_dim": 64},
        "kvzap": {
            **_SMOLLM2,
            "lr": 5e-3,
            "steps": 1408,
            "passes": 8,
            "hidden_dim": 72,
            "log_steps": 32,
            "save_steps": 128,
        },
        "lococo": {
            **_SMOLLM2,
            "steps": 160,
            "accumulate": 2,
            "lr": 5e-2,
            "capacity": 80,
            "chunk": 160,
            "kernel_size": 11,
        },
        "seerattn_r": {**_SMOLLM2, "steps": 150, "gate_dim": 32, "block": 16},
    },
}


def recipe_of(model: str, policy: str) -> Recipe:
    """Return the recipe of a policy for a model, as named by `--model`; empty if there is none."""
    return RECIPES.get(model, {}).get(policy, {})
