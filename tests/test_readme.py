"""The README says what is true: counts, and the table of its first example."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import kvbench
from kvbench.cli import call, listing
from kvbench.report.overall import group_means
from kvbench.spelling import policy

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_number_of_policies_is_that_of_the_list() -> None:
    rows, failed = listing.policies()
    assert failed == []
    distinct = [row for row in rows if row["name"] not in ("full", "critical_adakv")]
    assert all(row["is"] == row["name"] for row in distinct)  # critical_adakv is criticalkv
    said = re.search(r"\| policies \| (\d+): (\d+) training-free and (\d+) learned", README)
    assert said is not None
    total, free, learned = map(int, said.groups())
    gates = [row for row in distinct if "gates" in row["parameters"]]
    assert (total, free, learned) == (len(distinct), len(distinct) - len(gates), len(gates))


def test_the_number_of_tasks_is_that_of_the_list() -> None:
    rows, failed = listing.tasks()
    assert failed == []
    leaves = {leaf for row in rows for leaf in row["tasks"]}
    assert f"| tasks | {len(leaves)} in {len(rows)} groups." in README
    ruler = next(row for row in rows if row["name"] == "ruler")
    assert f"RULER ({len(ruler['tasks'])})" in README


def test_the_number_of_recipes_is_that_of_the_list() -> None:
    rows, failed = listing.recipes()
    assert failed == []
    assert f"| recipes | {len(rows)} tables and figures" in README


def test_every_policy_of_the_list_has_a_row_in_the_table() -> None:
    section = README[README.index("## What the reference model says") :]
    shown = set(re.findall(r"^\| `(\w+)` \| \d", section, re.MULTILINE))
    rows, _ = listing.policies()
    on_text = {row["name"] for row in rows if policy(row["name"]).group != "pruning"}
    own = {row["name"] for row in rows if row["is"] == row["name"]}
    assert shown == (own & on_text) - {"full"}


@pytest.mark.slow
def test_the_table_of_the_first_example_is_what_its_command_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = README[README.index("## Choose a policy and a budget") :]
    block = re.search(r"```bash\n(kvbench run .*?)\nkvbench report", section, re.DOTALL)
    assert block is not None
    assert call([*shlex.split(block[1].replace("\\\n", " "))[1:], "--quiet"]) == 0
    means = group_means(*kvbench.load("results/choice"))
    scores = {(row.policy, row.budget): f"{100 * row.score:.1f}" for row in means.itertuples()}
    table = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", section, re.MULTILINE)
    said = {
        (policy, budget): score
        for policy, *row in table
        for budget, score in zip(("0.1", "0.2", "0.4"), row, strict=True)
    }
    assert said == {key: score for key, score in scores.items() if key[0] != "full"}
    assert f"The full cache has {scores['full', 'full']}." in section
