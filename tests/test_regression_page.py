"""The workflow that a reader copies, and the commands of the page on regression tests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import kvbench
from kvbench.cli.app import app
from kvbench.regression.compare import Outcome, compare
from kvbench.runs.grid import Grid

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / "examples" / "regression.yml"
PAGE = (ROOT / "docs" / "regression.md").read_text(encoding="utf-8")
BASELINES = sorted(p.parent for p in (ROOT / "results" / "baseline").glob("*/grid.yaml"))


def commands(text: str) -> Iterator[list[str]]:
    """The calls of kvbench in a shell script."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["kvbench"]:
            yield words[1:]


def parse(words: list[str]) -> None:
    """Parse a call without running it; the error of a wrong one is raised."""
    group: Any = typer.main.get_command(app)
    group.commands[words[0]].make_context(words[0], words[1:])


def test_the_workflow_is_valid_and_its_commands_parse() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert set(workflow[True]) == {"pull_request", "push"}  # YAML 1.1 reads `on` as true
    (job,) = workflow["jobs"].values()
    assert job["runs-on"] and all(("run" in step) != ("uses" in step) for step in job["steps"])
    found = [words for step in job["steps"] for words in commands(step.get("run", ""))]
    assert [words[0] for words in found] == ["run", "compare"]
    for words in found:
        parse(words)
    assert found[0][found[0].index("--out") + 1] == found[1][2]  # what is run is compared


def test_the_commands_of_the_page_parse() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    found = [words for block in blocks for words in commands(block)]
    assert {words[0] for words in found} == {"run", "power", "compare"} and len(found) == 9
    for words in found:
        parse(words)


def test_a_wrong_command_does_not_parse() -> None:
    for wrong in ("compare a", "compare a b --max-dorp 1", "power --rate much"):
        with pytest.raises(Exception, match=r"Missing|No such option|valid number"):
            parse(wrong.split())


def test_every_result_has_a_row_on_the_page() -> None:
    section = PAGE[PAGE.index("| result | meaning |") : PAGE.index("## Exit codes")]
    assert re.findall(r"^\| `([\w ]+)` \|", section, re.MULTILINE) == [o.value for o in Outcome]


@pytest.mark.parametrize("folder", BASELINES, ids=lambda folder: folder.name)
def test_a_baseline_has_a_score_in_every_cell_and_its_grid_is_what_was_run(folder: Path) -> None:
    frames = kvbench.load(folder)
    found = compare(frames, frames)
    assert found.complete and not found.failed
    assert {cell.outcome for cell in found.cells} == {Outcome.SAME}
    grid = Grid.from_yaml(folder / "grid.yaml", {})
    assert set(frames[0]["policy"]) == {"full", *map(str, grid.policies)}
    assert (frames[0]["samples"] == grid.samples).all()
    tracked = {path.name for path in folder.iterdir()} - {"responses.jsonl", ".lock"}
    assert tracked == {"grid.yaml", "cells.parquet", "samples.parquet"}


def test_there_is_a_baseline() -> None:
    assert "reference" in {folder.name for folder in BASELINES}
