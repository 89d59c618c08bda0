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
LOCAL = re.compile(r"(?<!\\)\]\(([^)\s#:]+)(?:#[^)]*)?\)")


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
        (found,) = item.values()
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
    nav = list(entries(section("nav")))
    assert len(set(nav)) == len(nav)
    assert all((folder / name).is_file() for name in nav)
    left_out = tuple(line.removeprefix("/") for line in section("not_in_nav").split())
    assert {str(page) for page in made if not str(page).startswith(left_out)} <= set(nav)


def test_every_link_to_a_file_leads_somewhere(site: ModuleType, pages: tuple[Path, list[Path]]) -> None:
    folder, made = pages
    seen = 0
    for page in made:
        text = "".join(site.CODE.split((folder / page).read_text(encoding="utf-8"))[::2])
        for name in LOCAL.findall(text):
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
    [("ci", {"lint", "test", "run", "docs"}), ("nightly", {"recipes", "oldest"})],
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
