"""Benchmarks refuse wrong input in one line, with exit status 2."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from benchmarks import grid, grid_memory, long_context, scale, versions


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
    script: ModuleType,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    (line,) = capsys.readouterr().err.splitlines()
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
    script: ModuleType,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert f"error: {said}" in capsys.readouterr().err
