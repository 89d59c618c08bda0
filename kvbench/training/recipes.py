"""Settings with which the gates that ship with kvbench were trained, by model and policy.

    kvbench train gates --model smollm2 --policy trimkv

uses them, and `python -m scripts.gates` in a checkout trains all of a model's gates again.
"""

from __future__ import annotations

from typing import Any

Recipe = dict[str, Any]
"""Settings by name, and `OUTSIDE`; other settings are the defaults."""

OUTSIDE = ("data", "dtype")
"""What a recipe gives that is not a setting."""

_REFERENCE: Recipe = {"data": "reference", "length": 384, "lr": 2e-3, "log_steps": 5}
"""Ten times the papers' learning rate, because these trainings take minutes instead of days; that
of `lococo` is its authors' own."""

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
"""Narrow gates in half precision, at most 4 MB of them. In bfloat16 the model takes half the time
on a CPU that multiplies in it. Blocks are of 16 entries instead of the paper's 64, because contexts
of a few hundred tokens have few blocks of 64."""

_REFERENCE_VL: Recipe = {
    "data": "shapes_vqa,shapes_dialogue",
    "length": 400,
    "lr": 2e-3,
    "log_steps": 5,
}
"""Samples of its own tasks with seeds that no evaluation uses."""

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
    """The recipe of a model, by the name that `--model` takes, and a policy; empty without one."""
    return RECIPES.get(model, {}).get(policy, {})
