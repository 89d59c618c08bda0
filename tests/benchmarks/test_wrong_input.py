"""Benchmarks refuse wrong input in one line, with exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TypeAlias

import pytest

from benchmarks import grid, grid_memory, long_context, scale, versions

Refusal: TypeAlias = Callable[[ModuleType, list[str]], str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """What a script prints as it refuses arguments with exit status 2."""

    def refused(script: ModuleType, arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        with pytest.raises(SystemExit, match="2"):
            script.main()
        return capsys.readouterr().err

    return refused


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        (grid, ["--task", "nope"], "unknown task 'nope'"),
        (grid, ["--policies", "snapvk"], "unknown policy 'snapvk'; did you mean snapkv?"),
        (grid_memory, ["--limits", "10QB"], "cache_memory must be a size"),
        (long_context, ["--memory", "abc"], "--memory must be a size"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    refusal: Refusal, script: ModuleType, arguments: list[str], said: str
) -> None:
    (line,) = refusal(script, arguments).splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        (grid, ["--repeats", "0"], "--repeats and --kvpress-contexts must be at least 1"),
        (versions, [".", "--rounds", "0"], "--rounds must be at least 1"),
        (scale, ["--steps", "nope"], "no step 'nope'; choose from fill, plan,"),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_measured(
    refusal: Refusal, script: ModuleType, arguments: list[str], said: str
) -> None:
    assert f"error: {said}" in refusal(script, arguments)
