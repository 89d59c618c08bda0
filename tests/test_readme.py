"""The README is short; counts and tables of the pages that it leads to are true."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

import kvbench
from kvbench.cli import call, listing
from kvbench.report.overall import group_means
from kvbench.spelling import policy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OVERVIEW, OPTIONS, REFERENCE, INSTALL = (
    (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for page in ("overview", "options", "reference", "install")
)


def test_the_readme_is_short_and_begins_with_the_installation() -> None:
    assert len(README.split()) <= 1500
    first_lines = "\n".join(README.splitlines()[:45])
    for text in ("pip install .", "https://download.pytorch.org/whl/cpu", "make run", ". .venv/bin/activate"):
        assert text in first_lines, text


def test_every_extra_is_explained_and_every_extra_that_is_named_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    section = INSTALL[INSTALL.index("## Extras") : INSTALL.index("## lmms-eval")]
    first_cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)} == extras
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *ROOT.glob("docs/*.md")]
    code = [path for folder in ("kvbench", "policies", "tasks", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    named = {
        name: path
        for path in (*pages, *code)
        for names in re.findall(r"'(?:kvbench|\.)\[([\w,]+)\]'", path.read_text(encoding="utf-8"))
        for name in names.split(",")
        if name != "NAME"  # stands for any of them
    }
    assert {"gguf", "ray", "vision"} <= set(named)
    assert {name: path for name, path in named.items() if name not in extras} == {}


def test_the_number_of_policies_is_that_of_the_list() -> None:
    rows, failed = listing.policies()
    assert failed == []
    distinct = [row for row in rows if row["name"] not in ("full", "critical_adakv") and not row["informed"]]
    assert all(row["is"] == row["name"] for row in distinct)  # critical_adakv is criticalkv
    said = re.search(r"\| policies \| (\d+): (\d+) training-free and (\d+) learned", OVERVIEW)
    assert said is not None
    total, free, learned = map(int, said.groups())
    gates = [row for row in distinct if "gates" in row["parameters"]]
    assert (total, free, learned) == (len(distinct), len(distinct) - len(gates), len(gates))


def test_the_number_of_tasks_is_that_of_the_list() -> None:
    rows, failed = listing.tasks()
    assert failed == []
    leaves = {leaf for row in rows for leaf in row["tasks"]}
    assert f"| tasks | {len(leaves)} in {len(rows)} groups." in OVERVIEW
    ruler = next(row for row in rows if row["name"] == "ruler")
    assert f"RULER ({len(ruler['tasks'])})" in OVERVIEW


def test_the_number_of_recipes_is_that_of_the_list() -> None:
    rows, failed = listing.recipes()
    assert failed == []
    assert f"| recipes | {len(rows)} tables and figures" in OVERVIEW


def test_every_policy_of_the_list_has_a_row_in_the_table() -> None:
    section = REFERENCE[REFERENCE.index("## All policies") : REFERENCE.index("## What CriticalKV adds")]
    shown = set(re.findall(r"^\| `(\w+)` \| \d", section, re.MULTILINE))
    rows, _ = listing.policies()
    on_text = {row["name"] for row in rows if policy(row["name"]).group != "pruning"}
    own = {row["name"] for row in rows if row["is"] == row["name"] and not row["informed"]}
    assert shown == (own & on_text) - {"full"}


@pytest.mark.slow
def test_the_table_of_the_first_example_is_what_its_command_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = OPTIONS[OPTIONS.index("## Choose a policy and a budget") :]
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
