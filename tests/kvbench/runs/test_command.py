"""The command of a grid gives the grid again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from kvbench.runs.command import command_line
from kvbench.runs.grid import Grid
from kvbench.runs.options import options


def parsed(command: str) -> dict[str, Any]:
    """Values by flag; True and False for a flag without a value."""
    words = shlex.split(command)
    assert words[:2] == ["kvbench", "run"]
    values: dict[str, Any] = {}
    switches = {spelling: i == 0 for _, o in options() for i, spelling in enumerate(o.spelling.split("/")) if spelling}
    names = {spelling: o.flag or name for name, o in options() for spelling in o.spelling.split("/") if spelling}
    rest = iter(words[2:])
    for word in rest:
        if word in switches:
            values[names[word]] = switches[word]
        else:
            values[word.removeprefix("--").replace("-", "_")] = next(rest)
    return values


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budgets": ["0.1", "64"], "moments": ["question", "chunked:64"], "lengths": [512, 2048], "seed": 3},
        {"full": False, "chat_template": True, "thinking": False, "confirm_run_unsafe_code": True},
        {"models": ["./a folder/model"], "policies": ["./my.py:Mine:a='x'", "snapkv:window=8"], "dtype": "bfloat16"},
        {"gen_kwargs": "max_gen_toks=64", "temperature": 0.6, "repeats": 2, "system_instruction": "Say $HOME; `now`"},
    ],
)
def test_a_command_repeats_its_grid(changes: dict[str, Any]) -> None:
    grid = Grid.from_dict({"policies": ["snapkv"], "tasks": ["vt"], "samples": 7, **changes})
    again = Grid.from_dict(parsed(command_line(grid.to_dict())))
    assert again == grid


def test_options_of_the_machine_and_of_the_output_are_left_out() -> None:
    values = {"policies": ["snapkv"], "tasks": ["vt"], "out": "results/x", "executor": "ray", "workers": 4}
    assert command_line(values | {"batch_size": 8, "device_map": {"": 0}}) == "kvbench run --policy snapkv --task vt"
