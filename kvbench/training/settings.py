"""The settings of a training: defaults, recipes, and checks of what the user gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvbench.errors import UserError, unknown
from kvbench.training.method import Method
from kvbench.training.recipes import OUTSIDE, recipe_of

_DEFAULTS: dict[str, Any] = {
    "steps": None,
    "tokens": None,
    "batch_size": 1,
    "accumulate": 4,
    "warmup": 0,
    "capacity_weight": 1.0,
    "capacity_reduce": "mean",
    "kl": True,
    "ntp": True,
    "with_capacity": True,
    "reverse_kl": False,
    "seed": 0,
    "split": "train",
    "subset": None,
    "column": None,
    "log_steps": None,
    "save_steps": None,
    "checkpointing": None,
    "half": False,
}
_STEPS = 1000
_CHOICES = {
    "schedule": ("linear", "cosine", "constant"),
    "gate": ("mlp", "linear"),
    "input": ("hidden", "kv"),
    "gating": ("additive", "multiplicative"),
    "capacity_reduce": ("mean", "sum"),
}
_COUNTS = (
    *("steps", "tokens", "batch_size", "accumulate", "length", "capacity", "hidden_dim"),
    *("gate_dim", "block", "log_steps", "save_steps", "passes", "chunk", "kernel_size"),
)
_DISTIL_ONLY = (
    *("kl", "ntp", "with_capacity", "reverse_kl", "capacity_weight"),
    *("capacity_reduce", "gating", "input", "tied"),
)
_APPLIES_TO = {
    **dict.fromkeys(_DISTIL_ONLY, ("distil",)),
    **dict.fromkeys(("gate", "hidden_dim"), ("distil", "regress", "replay")),
    **dict.fromkeys(("chunk", "kernel_size", "keep_rate", "mix"), ("compress",)),
    "capacity": ("distil", "compress"),
    "gate_dim": ("distil", "match"),
    "bias": ("distil", "replay"),
    "passes": ("replay",),
    "block": ("match",),
}
"""Objectives by the settings that do not apply to all of them."""
_FLAGS = {"kl": "no-kl", "ntp": "no-ntp", "with_capacity": "no-capacity", "column": "text-column"}
"""Flags that are not the name of their setting."""


def complete(method: Method, model: str, window: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the given settings and add the others.

    The others are those of the model's recipe, where it has one, and otherwise those of the paper.

    Args:
        method: What is trained.
        model: The model as the user named it.
        window: Positions of the model; 0 if unknown.
        options: Settings by name; None counts as not given.

    Returns:
        All settings; only `checkpointing` can be None, which leaves it to the device.

    Raises:
        UserError: A setting is unknown or out of range, or two settings contradict each other.
    """
    explicit = {setting: value for setting, value in options.items() if value is not None}
    recipe_settings = {
        setting: recipe_value
        for setting, recipe_value in recipe_of(model, method.name).items()
        if setting not in OUTSIDE
    }
    settings = {**_DEFAULTS, **method.defaults, **recipe_settings, **explicit}
    known_names = {*_DEFAULTS, *_APPLIES_TO, *method.defaults}
    for setting in explicit:
        if setting not in known_names:
            raise unknown("setting", setting, known_names)
        if method.objective not in _APPLIES_TO.get(setting, (method.objective,)):
            raise UserError(f"{_flag(setting)} does not apply to {method.name}; leave it out")
    if "tokens" in explicit and "steps" in explicit:
        raise UserError("--tokens and --steps both set the length of the training; use one of them")
    if window and settings["length"] > window:
        if "length" in explicit:
            raise UserError(f"--length {settings['length']} does not fit: model {model} has {window} positions")
        settings["length"] = window
    _check(settings, method)
    token_count = settings.pop("tokens")
    if token_count is not None:
        tokens_per_step = settings["batch_size"] * settings["accumulate"] * settings["length"]
        settings["steps"] = max(1, round(token_count / tokens_per_step))
    step_count = settings["steps"] = settings["steps"] or _STEPS
    settings["log_steps"] = settings["log_steps"] or max(1, step_count // 100)
    settings["save_steps"] = settings["save_steps"] or max(1, min(200, step_count // 5))
    return settings


def _check(settings: Mapping[str, Any], method: Method) -> None:
    for setting, choices in _CHOICES.items():
        value = settings.get(setting)
        if value is not None and value not in (*choices, method.defaults.get(setting)):
            raise UserError(f"{_flag(setting)} {value} is unknown; use {' or '.join(choices)}")
    for setting in _COUNTS:
        value = settings.get(setting)
        minimum = 2 if setting == "length" else 1
        if value is not None and value < minimum:
            raise UserError(f"{_flag(setting)} {value} is too small; use {minimum} or more")
    for setting in ("lr", "weight_decay", "capacity_weight", "warmup", "seed", "bias"):
        value = settings.get(setting, 1.0)
        in_range = setting == "bias" or value > 0 or (value == 0 and setting != "lr")
        if not (math.isfinite(value) and in_range):
            advice = {"bias": "a finite number", "lr": "a number above 0"}.get(setting, "0 or more")
            raise UserError(f"{_flag(setting)} {value} is invalid; use {advice}")
    if method.objective == "distil":
        _check_loss(settings)
    if method.objective == "compress":
        _check_compression(settings)
    if method.objective == "match" and settings["length"] < 2 * settings["block"]:
        raise UserError(
            f"--length {settings['length']} holds no two blocks of {settings['block']} tokens; use "
            "longer data or a smaller --block"
        )


def _check_loss(settings: Mapping[str, Any]) -> None:
    has_capacity = settings["with_capacity"] and settings["capacity_weight"]
    if not (settings["kl"] or settings["ntp"] or has_capacity):
        raise UserError("--no-kl --no-ntp --no-capacity leaves no loss; drop one of them")
    if settings["reverse_kl"] and not settings["kl"]:
        raise UserError("--reverse-kl and --no-kl contradict each other; use one of them")
    if has_capacity and settings["capacity"] >= settings["length"]:
        raise UserError(
            f"--capacity {settings['capacity']} is not below --length {settings['length']}, so the "
            "capacity loss would be 0; use a smaller --capacity, longer data or --no-capacity"
        )


def _check_compression(settings: Mapping[str, Any]) -> None:
    for setting in ("keep_rate", "mix"):
        if not 0 <= settings[setting] <= 1:
            raise UserError(f"{_flag(setting)} {settings[setting]} is invalid; use a number from 0 to 1")
    if settings["kernel_size"] % 2 == 0:
        raise UserError(f"--kernel-size {settings['kernel_size']} is even; use an odd number")
    if settings["capacity"] * (1 - settings["keep_rate"]) < 1:
        raise UserError(
            f"--keep-rate {settings['keep_rate']} leaves none of --capacity "
            f"{settings['capacity']} to merge into; use a smaller --keep-rate"
        )
    # A layer is cut before a chunk; the last token of a sequence is only a target.
    max_prefix = (settings["length"] - 2) // settings["chunk"] * settings["chunk"]
    if settings["capacity"] >= max_prefix:
        raise UserError(
            f"at most {max_prefix} tokens of --length {settings['length']} precede a --chunk of "
            f"{settings['chunk']}, which must be more than --capacity {settings['capacity']}, or "
            "nothing is ever cut; use smaller ones"
        )


def _flag(setting: str) -> str:
    return f"--{_FLAGS.get(setting, setting.replace('_', '-'))}"
