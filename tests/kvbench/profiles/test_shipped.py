"""What ships for policies that look up what heads or queries do was not measured on what they are
evaluated on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvbench.harness.catalogue import resolve_task
from kvbench.profiles import files
from kvbench.profiles.command import TASK
from kvbench.profiles.files import PROFILES
from kvbench.profiles.summaries import FILTERS, STATISTICS

ROOT = Path(__file__).parents[3]


def evaluated() -> set[str]:
    """The tasks of every recorded run, and all generated needles."""
    grids = [yaml.safe_load(path.read_text()) for path in ROOT.glob("results/**/grid.yaml")]
    specs = {task for grid in grids for task in grid["tasks"]} | {"ruler", "niah", "niah_hard"}
    return {leaf for spec in specs for leaf, _ in resolve_task(spec)}


def seen() -> dict[str, str]:
    """The tasks that everything shipped was measured on."""
    found = {path.name: files.read(path).task for path in PROFILES.shipped.glob("*.json")}
    for sort in (FILTERS, STATISTICS):
        folders = sort.artifacts.shipped.glob(f"*.{sort.name}")
        found |= {folder.name: sort.read(folder)[1].task for folder in folders}
    return found


def test_nothing_that_ships_was_measured_on_an_evaluated_task() -> None:
    found = seen()
    assert len(found) == 6
    assert {task for tasks in found.values() for task in tasks.split(",")} == {TASK}
    assert TASK not in evaluated()


@pytest.mark.parametrize("model", ["reference-1", "SmolLM2-135M-Instruct.Q4_1"])
def test_most_of_the_answers_behind_a_shipped_profile_were_right(model: str) -> None:
    (path,) = PROFILES.shipped.glob(f"{model}.*.json")
    made = files.read(path)
    assert made.answered is not None
    assert made.answered > 0.5
