"""The `kvbench run` command of a grid."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from kvbench.runs.options import MACHINES, OUTPUT, GridOptions, Option, flag_of, options

_OF_THE_MACHINE = ("batch_size", "cache_memory", "device_map")
"""Options of the model that change no response."""


def portable_options(grid_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a grid without those that belong to a machine or name the output.

    Args:
        grid_values: Values by field of `GridOptions`, as in `grid.yaml`.
    """
    return {
        name: grid_values[name]
        for name, option in options()
        if name in grid_values and option.panel not in (MACHINES, OUTPUT) and name not in _OF_THE_MACHINE
    }


def command_line(grid_values: Mapping[str, Any]) -> str:
    """Return the command that repeats a grid on another machine, without options that are at their defaults.

    Values are quoted for a shell, so they may come from an unknown source.
    """
    defaults = {declared.name: declared.default for declared in fields(GridOptions)}
    declared_options = dict(options())
    arguments = ["kvbench", "run"]
    for name, value in portable_options(grid_values).items():
        comparable = tuple(value) if isinstance(value, list) else value
        if value is not None and comparable != defaults[name]:
            arguments += _flag_words(name, declared_options[name], value)
    return shlex.join(arguments)


def _flag_words(name: str, option: Option, value: Any) -> Iterator[str]:
    """Yield a flag and its value, if it takes one."""
    if option.kind is bool:
        positive, _, negative = option.spelling.partition("/")
        yield from [positive] if value else [negative] * bool(negative)
        return
    yield f"--{flag_of(name).replace('_', '-')}"
    if isinstance(value, Mapping):
        yield ",".join(f"{key}={item}" for key, item in value.items())
    else:
        yield ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
