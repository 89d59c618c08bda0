"""Comparisons with packages in other environments, with this environment in their place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quantised_caches import distance, taken
from benchmarks.two_sides import Other, both_sides, cases_of

NUMPY = Other("other", "numpy", "'numpy>1'")


def compare(folder: Path) -> int:
    return int((folder / "theirs").read_text())


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str], **changes: Any) -> int:
    def other_side(folder: Path) -> None:
        (folder / "theirs").write_text(str(cases_of(folder)[0]["status"]))

    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    given: dict[str, Any] = {"other_side": other_side, "compare": compare} | changes
    return both_sides("benchmarks.none", "About.", NUMPY, lambda folder: [{"status": 3}], **given)


def test_without_the_other_environment_the_script_says_how_to_make_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, []) == 2
    said = capsys.readouterr().out
    assert ".venv-other/bin/pip install 'numpy>1'" in said
    assert "python -m benchmarks.none --other-python .venv-other/bin/python" in said


def test_the_other_side_runs_in_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []

    def process(command: list[str], **_: Any) -> Any:
        started.append(command)
        if "--other-side" in command:
            run(monkeypatch, command[3:])
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr("subprocess.run", process)
    assert run(monkeypatch, ["--other-python", sys.executable]) == 3
    assert started[0] == [sys.executable, "-c", "import numpy"]
    assert started[1][:4] == [sys.executable, "-m", "benchmarks.none", "--other-side"]


def test_a_failed_other_side_is_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(command: list[str], **_: Any) -> Any:
        return type("Done", (), {"returncode": int("-m" in command)})

    monkeypatch.setattr("subprocess.run", process)
    assert run(monkeypatch, ["--other-python", sys.executable]) == 2


def test_the_distance_of_logits_is_their_divergence() -> None:
    full = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    assert distance(full + 1, full) == (pytest.approx(0.0, abs=1e-12), True)
    found, same = distance(torch.tensor([[0.0, 3.0], [4.0, 0.0]]), full)
    right = torch.tensor([0.5, 0.5], dtype=torch.float64)
    other = torch.tensor([0.0, 3.0], dtype=torch.float64).softmax(-1)
    assert found == pytest.approx(float((right * (right / other).log()).sum()) / 2)
    assert not same


def test_bytes_are_those_of_plain_tensors() -> None:
    held = ((torch.zeros(3, dtype=torch.uint8), {"scale": torch.zeros(2), "bits": 4}), ())
    assert taken(held) == 3 + 8
