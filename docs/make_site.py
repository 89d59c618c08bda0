"""Collect the pages of the site in a folder: `python docs/make_site.py build/site-pages`.

The pages of the site are the Markdown files of the repository, at the same paths, so that their
links hold in both. What they link to is copied as well. docs/policies.md becomes an index and a page
per policy. The list of tasks and the leaderboard of `results/` are made here. `mkdocs build --strict` makes the site.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from kvbench.leaderboard.entries import leaderboard_data
from kvbench.leaderboard.publication import find_publications, publish
from kvbench.leaderboard.site import write_site

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/api/*.md",
    "tasks/kvbench_tasks/*/README.md",
)
NOTEBOOKS = "docs/notebooks/*.ipynb"
TASKS = "docs/tasks.md"
"""The list of tasks, which is made here."""
POLICIES = ROOT / "docs" / "policies.md"
"""All policies, which becomes an index and a page per policy and per kind of part."""
POLICY_FOLDER = Path("docs") / "policies"
LEADERBOARD = "leaderboard"
"""Folder of the leaderboard in the site."""
RUNS = (
    "smollm2",
    "smollm2-fitted",
    "smollm2-bytes",
    "leaderboard",
    "reference-vl",
    "baseline/reference",
    "baseline/smollm2",
)
"""Runs of `results/` that are in it."""

CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
LINK = re.compile(rf"{CODE.pattern}|(?<!\\)(!?\[[^\]]*\])\(([^)\s]+)\)", re.DOTALL)
"""Code, which is left as it is, or a link, whose label can be code."""


def collect(folder: Path) -> list[Path]:
    """Fill the folder, which is emptied first.

    Returns:
        The pages, relative to the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    left = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    done: list[Path] = []
    for path in left:
        own_page = path.relative_to(ROOT)
        for page, content in policy_pages()[0].items() if path == POLICIES else [(own_page, path.read_text("utf-8"))]:
            text, linked = with_links(content, path, page)
            write(folder / page, text)
            done.append(page)
            for other in linked:
                if other.suffix == ".md":
                    left += [other] if other not in left else []
                else:
                    copy(other, folder)
    for path in sorted(ROOT.glob(NOTEBOOKS)):
        name = path.relative_to(ROOT).with_suffix(".md")
        write(folder / name, notebook(path))
        copy(path, folder)
        done.append(name)
    write(folder / TASKS, tasks())
    make_leaderboard(folder / LEADERBOARD)
    return [*done, Path(TASKS)]


@functools.cache
def policy_pages() -> tuple[dict[Path, str], dict[str, tuple[Path, str]]]:
    """Divide the page of all policies.

    Returns:
        Pages by path: the index, one per policy and one per kind of part; and by anchor of the whole page, the page
        and the anchor that have taken its place.
    """
    index = POLICIES.relative_to(ROOT)
    head, *sections = re.split(r"^(?=## )", POLICIES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = {index: head}
    places: dict[str, tuple[Path, str]] = {}
    for section in sections:
        title, *entries = re.split(r"^(?=### )", section, flags=re.MULTILINE)
        names = [entry.partition("\n")[0].removeprefix("### ") for entry in entries]
        if not entries:
            pages[index] += section
        elif "=" in names[0]:  # parts, such as `score=window`
            page = POLICY_FOLDER / f"{title[3:].split()[0].lower()}.md"
            pages[page] = title[1:] + "".join(entry[1:] for entry in entries)
            places |= {anchor_of(name): (page, anchor_of(name)) for name in names}
        else:
            for name, entry in zip(names, entries, strict=True):
                page = POLICY_FOLDER / f"{name}.md"
                pages[page] = entry[2:]
                places[anchor_of(name)] = (page, "")
    return pages, places


def anchor_of(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def with_links(text: str, path: Path, page: Path | None = None) -> tuple[str, list[Path]]:
    """A page for the site, and the files of the repository that it links to.

    A folder cannot be linked to: its README stands for it, and without one the link is left out.

    Args:
        text: The page.
        path: Its file in the repository, from which its links start.
        page: Its path in the site, if it is elsewhere.
    """
    linked: list[Path] = []
    moved = page is not None and page != path.relative_to(ROOT)
    folder = (ROOT / page if page is not None else path).parent

    def link(match: re.Match[str]) -> str:
        code, label, target = match.groups()
        if code:
            return match[0]
        name, hash_, anchor = target.partition("#")
        if ":" in name:
            return match[0]
        found = (path.parent / name).resolve() if name else path
        if found == POLICIES and anchor in policy_pages()[1]:
            linked.append(POLICIES)
            place, anchor = policy_pages()[1][anchor]
            return f"{label}({os.path.relpath(ROOT / place, folder)}{'#' * bool(anchor)}{anchor})"
        if not name and not moved:
            return match[0]
        if found.is_dir():
            if not (found / "README.md").exists():
                return label[1:-1]
            name, found = f"{name.rstrip('/')}/README.md", found / "README.md"
        if found.is_relative_to(ROOT) and found.exists() and found != ROOT / TASKS:
            linked.append(found)
        if moved:
            name = os.path.relpath(found, folder)
        return f"{label}({name}{hash_}{anchor})"

    return LINK.sub(link, text), linked


def notebook(path: Path) -> str:
    """A notebook as a page: its text and its code."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    note = f"This page is the notebook [{path.name}]({path.name})."
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"


def tasks() -> str:
    """A list of the tasks' pages with their titles."""
    lines = [
        "# Tasks",
        "",
        "Each benchmark has a page: source, version, prompts, metric, a row.",
        "",
    ]
    for path in sorted(ROOT.glob("tasks/kvbench_tasks/*/README.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- [{title}](../{path.relative_to(ROOT)})")
    return "\n".join(lines) + "\n"


def make_leaderboard(folder: Path) -> None:
    """Publish our own runs and write their leaderboard."""
    with tempfile.TemporaryDirectory() as published_name:
        published_folder = Path(published_name)
        for run in RUNS:
            publish(ROOT / "results" / run, published_folder)
        write_site(leaderboard_data(find_publications([published_folder])), folder)


def write(path: Path, text: str) -> None:
    """Write a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy(path: Path, folder: Path) -> None:
    """Copy a file of the repository to the same place in the folder."""
    target = folder / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
