"""The settings of a training: defaults, recipes, and checks of what the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.errors import UserError, unknown
from kvbench.training.method import Method
from kvbench.training.options import TrainingOptions, flag_of, settings_table
from kvbench.training.recipes import OUTSIDE, recipe_of

_STEPS = 1000


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
    declared = dict(settings_table())
    known_names = {"half", *declared, *method.defaults}
    for setting in options:
        if setting not in known_names:
            raise unknown("setting", setting, known_names)
    given = TrainingOptions.of({name: value for name, value in options.items() if name in declared})
    others = {name: value for name, value in options.items() if name not in declared}
    explicit = {name: value for name, value in {**vars(given), **others}.items() if value is not None}
    for setting in explicit.keys() & declared.keys():
        if method.objective not in (declared[setting].objectives or (method.objective,)):
            raise UserError(f"{flag_of(setting)} does not apply to {method.name}; leave it out")
    recipe_settings = {
        setting: recipe_value
        for setting, recipe_value in recipe_of(model, method.name).items()
        if setting not in OUTSIDE
    }
    defaults = {name: setting.default for name, setting in declared.items() if setting.default is not ...}
    settings = {"half": False, **defaults, **method.defaults, **recipe_settings, **explicit}
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
    """Check settings that depend on each other."""
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
