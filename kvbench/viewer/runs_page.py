"""A page that lists all runs of a folder and links to the page of each.

Each run keeps a page of its own, because one page of 50 runs would have hundreds of MB. Links are relative, so that a
folder can be copied or served as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvbench.errors import UserError
from kvbench.files import write_whole
from kvbench.progress import Reporter
from kvbench.report.page.data import escape_texts
from kvbench.report.page.html import assemble, asset
from kvbench.runs.folders import RunSummary, find_runs
from kvbench.viewer.run_page import run_page

NAME = "index.html"


def write_runs_page(
    root: Path, reporter: Reporter, metric: str | None = None, output_folder: Path | None = None
) -> tuple[Path, list[str]]:
    """Write the page of all runs in a folder, and the pages of runs that lack one; the same runs give the same bytes.

    A run without a page, because it is unfinished, damaged or of another schema, is listed with the reason.

    Args:
        root: Folder that holds runs, at any depth that `find_runs` searches.
        reporter: Progress reporter.
        metric: Metric of the scores on the pages of runs.
        output_folder: Folder of the page, with the pages of runs below it. Default: `root`, with each run's page in its
            `report/`.

    Returns:
        The path of the page, and a line per run or folder that has no page.

    Raises:
        UserError: There is no such folder, it holds no run, or the page cannot be written.
    """
    summaries = find_runs(root)
    if not summaries:
        raise UserError(f"no run in {root}; name the folder of a run, or one that holds runs")
    page_path = (output_folder or root) / NAME
    problems: list[str] = []
    records = []
    reporter.start(len(summaries), "pages of runs")
    for summary in summaries:
        run_folder = Path(summary.path)
        page_folder = output_folder / run_folder.relative_to(root) if output_folder else None
        link, problem = None, summary.problem
        try:
            link = _relative_link(run_page(run_folder, metric, page_folder), page_path.parent)
        except UserError as error:
            problem = str(error)
        if problem:
            problems.append(problem if summary.path in problem else f"{summary.path}: {problem}")
        records.append(_record(summary, root, link, problem))
        reporter.advance()
    without_run = list(_folders_without_run(root, summaries, output_folder))
    problems += [f"no run in {root / folder_name}" for folder_name in without_run]
    page_data = escape_texts({"root": str(root), "runs": records, "without": without_run})
    style = asset("report.css") + _own_asset("runs.css")
    page_text = assemble(
        page_data, _own_asset("runs.html"), style, [asset("dom.js"), _own_asset("runs.js")], libraries=()
    )
    write_whole(page_path, page_text.encode())
    return page_path, problems


def _record(summary: RunSummary, root: Path, link: str | None, problem: str) -> dict[str, Any]:
    return asdict(summary) | {"path": os.path.relpath(summary.path, root), "link": link, "problem": problem}


def _relative_link(page_path: Path, folder: Path) -> str:
    """Return the address of a page relative to a folder; `./` keeps a colon in a name from looking like a scheme."""
    return "./" + quote(os.fsencode(os.path.relpath(page_path, folder)))


def _folders_without_run(root: Path, summaries: Sequence[RunSummary], output_folder: Path | None) -> Iterator[str]:
    """Yield the names of the folders directly in `root` that hold no run."""
    holding_runs = {Path(summary.path).relative_to(root).parts[0] for summary in summaries}
    for path in sorted(root.iterdir()):
        is_output = output_folder is not None and output_folder.resolve().is_relative_to(path.resolve())
        if path.is_dir() and not path.name.startswith(".") and path.name not in holding_runs and not is_output:
            yield path.name


def _own_asset(file_name: str) -> str:
    return (resources.files(__package__) / file_name).read_text(encoding="utf-8")
