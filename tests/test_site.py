"""The pages of the site, before mkdocs sees them, and the workflows for forks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from .test_docs import script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return script("make_site")


@pytest.fixture(scope="module")
def pages(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("site")
    return folder, site.collect(folder)


def entries(nav: list[Any]) -> Iterator[str]:
    """The pages of a navigation."""
    for item in nav:
        found = next(iter(item.values())) if isinstance(item, dict) else item
        yield from entries(found) if isinstance(found, list) else [found]


def section(name: str) -> Any:
    """A section of mkdocs.yml, whose other sections hold tags that only mkdocs reads."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    found = re.search(rf"^{name}:.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return yaml.safe_load(found[0])[name]


def test_every_page_is_in_the_navigation_or_left_out_on_purpose(
    pages: tuple[Path, list[Path]],
) -> None:
    """`mkdocs build --strict` fails on any other page."""
    folder, made = pages
    nav = list(entries(script("site_hooks").with_policies(section("nav"), folder)))
    assert len(set(nav)) == len(nav)
    assert all((folder / name).is_file() for name in nav)
    left_out = tuple(line.removeprefix("/") for line in section("not_in_nav").split())
    assert {str(page) for page in made if not str(page).startswith(left_out)} <= set(nav)


def test_every_link_to_a_file_leads_somewhere(site: ModuleType, pages: tuple[Path, list[Path]]) -> None:
    folder, made = pages
    seen = 0
    for page in made:
        for _, label, target in site.LINK.findall((folder / page).read_text(encoding="utf-8")):
            name = target.partition("#")[0]
            if label and name and ":" not in name:
                seen += 1
                assert (folder / page.parent / name).is_file(), f"{page} links to {name}"
    assert seen > 50


def test_our_leaderboard_has_every_run_of_the_repository(site: ModuleType, pages: tuple[Path, list[Path]]) -> None:
    text = (pages[0] / site.LEADERBOARD / "index.html").read_text(encoding="utf-8")
    for model in ("reference", "reference-vl", "smollm2"):
        assert f'"models":["{model}"]' in text
    assert text.count('"digest":"') == len(site.RUNS)


def test_a_link_to_a_folder_is_one_to_its_readme_or_is_left_out(site: ModuleType) -> None:
    text = "[a](examples/kvbench_example_task) [b](kvbench/judge) `[c](kvbench)` [d](x://y) [e](#z)"
    found, linked = site.with_links(text, ROOT / "README.md")
    assert found == ("[a](examples/kvbench_example_task/README.md) b `[c](kvbench)` [d](x://y) [e](#z)")
    assert linked == [ROOT / "examples/kvbench_example_task/README.md"]


def test_every_policy_and_part_has_a_place_of_its_own(site: ModuleType, pages: tuple[Path, list[Path]]) -> None:
    folder, made = pages
    whole = site.POLICIES.read_text(encoding="utf-8")
    names = re.findall(r"^### (\w+)$", whole, re.MULTILINE)
    assert {"snapkv", "criticalkv", "full"} < set(names) and len(names) > 40
    for name in names:
        page = folder / "docs" / "policies" / f"{name}.md"
        assert page.read_text(encoding="utf-8").startswith(f"# {name}\n")
        assert page.relative_to(folder) in made
    index = (folder / "docs" / "policies.md").read_text(encoding="utf-8")
    assert len(index) < len(whole) / 2 and "](policies/snapkv.md)" in index
    assert "## What is observed" in index
    assert "[`window`](scores.md#scorewindow)" in (folder / "docs/policies/snapkv.md").read_text(encoding="utf-8")
    # Nothing is lost: every line is on one of the pages, with its links rewritten.
    lines = {re.sub(r"\]\([^)]*\)", "]", line.lstrip("#")) for page in made for line in (folder / page).open()}
    assert [
        line for line in whole.splitlines(keepends=True)
        if re.sub(r"\]\([^)]*\)", "]", line.lstrip("#")) not in lines and line != "## The policies\n"
    ] == []  # fmt: skip


def test_links_to_a_policy_lead_to_its_page(site: ModuleType) -> None:
    text = (
        "[`kvzip:plus=true`](policies.md#kvzip) [all](policies.md) [dart](policies.md#scoredart) `[a](policies.md#h2o)`"
    )
    found, _ = site.with_links(text, ROOT / "docs" / "training.md")
    assert found == (
        "[`kvzip:plus=true`](policies/kvzip.md) [all](policies.md) [dart](policies/scores.md#scoredart) "
        "`[a](policies.md#h2o)`"
    )
    moved, _ = site.with_links("[x](#snapkv) [y](data.md#z)", site.POLICIES, Path("docs/policies/adakv.md"))
    assert moved == "[x](snapkv.md) [y](../data.md#z)"


def test_no_two_pages_have_one_title(pages: tuple[Path, list[Path]]) -> None:
    folder, made = pages
    titles = [next(line for line in (folder / page).open() if line.startswith("# ")) for page in made]
    assert sorted(titles) == sorted(set(titles))


def test_a_header_without_text_is_left_out() -> None:
    hooks = script("site_hooks")
    body = "<tbody><tr><td>a</td><td>b</td></tr></tbody></table>"
    empty = '<table><thead>\n<tr>\n<th></th>\n<th style="text-align: right;"> </th>\n</tr>\n</thead>\n'
    assert hooks.on_page_content(empty + body, page=None) == "<table>" + body
    for header in ("<thead><tr><th></th><th>x</th></tr></thead>", "<thead><tr><th><code>x</code></th></tr></thead>"):
        assert hooks.on_page_content(header + body) == header + body


def test_the_api_pages_name_what_there_is() -> None:
    names = [
        name
        for page in sorted((ROOT / "docs" / "api").glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(names) > 10
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize(
    ("name", "jobs"),
    [("ci", {"lint", "test", "run", "docs"}), ("nightly", {"recipes", "oldest", "exhaustive"})],
)
def test_a_workflow_for_forks_runs_targets_that_exist(name: str, jobs: set[str]) -> None:
    path = ROOT / ".github" / "workflows" / f"{name}.yml"
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(workflow["jobs"]) == jobs
    for job in workflow["jobs"].values():
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert runs
        for command in runs:
            assert command.removeprefix("make ") in targets
        (python,) = (s for s in job["steps"] if "setup-python" in s.get("uses", ""))
        assert python["with"]["cache"] == "pip"
