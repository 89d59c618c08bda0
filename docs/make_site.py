"""Collect the pages of the site in a folder: `python docs/make_site.py build/site-pages`.

The pages of the site are the Markdown files of the repository, at the same paths, so that their
links hold in both. What they link to is copied as well. The list of tasks and the leaderboard of
`results/` are made here. `mkdocs build --strict` makes the site.
"""

from __future__ import annotations

import json
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

LINK = re.compile(r"(?<!\\)(!?\[[^\]]*\])\(([^)\s]+)\)")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


def collect(folder: Path) -> list[Path]:
    """Fill the folder, which is emptied first.

    Returns:
        The pages, relative to the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    left = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    done: list[Path] = []
    for path in left:
        text, linked = with_links(path.read_text(encoding="utf-8"), path)
        write(folder / path.relative_to(ROOT), text)
        done.append(path.relative_to(ROOT))
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


def with_links(text: str, path: Path) -> tuple[str, list[Path]]:
    """A page for the site, and the files of the repository that it links to.

    A folder cannot be linked to: its README stands for it, and without one the link is left out.
    """
    linked: list[Path] = []

    def link(match: re.Match[str]) -> str:
        label, target = match.groups()
        name, hash_, anchor = target.partition("#")
        if not name or ":" in name:
            return match[0]
        found = (path.parent / name).resolve()
        if found.is_dir():
            if not (found / "README.md").exists():
                return label[1:-1]
            name, found = f"{name.rstrip('/')}/README.md", found / "README.md"
        if found.is_relative_to(ROOT) and found.exists() and found != ROOT / TASKS:
            linked.append(found)
        return f"{label}({name}{hash_}{anchor})"

    parts = CODE.split(text)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts), linked


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
