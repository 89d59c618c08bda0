"""From flags to files: carries the analysis out, writes its tables, figures, summary and page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbench.analysis.common import make_grid
from kvbench.analysis.retention.figures import draw
from kvbench.analysis.retention.measure import analyze
from kvbench.analysis.retention.options import Options
from kvbench.analysis.retention.page import page
from kvbench.analysis.retention.tables import READING, frames, retention_tables
from kvbench.analysis.summary import notes
from kvbench.analysis.write import Done, folder_of, write_all
from kvbench.errors import UserError
from kvbench.files import replacing
from kvbench.progress import Reporter
from kvbench.report.text import listed

SAMPLES = 4
"""Texts of a task, where nobody says how many."""

_AS_CSV = ("sparsity", "tokens")


def write_retention(
    given: Mapping[str, Any],
    reporter: Reporter,
    *,
    options: Options,
    command: str = "kvbench analyze retention",
) -> Done:
    """Look at what policies retain and write all tables, figures, `summary.md` and a page.

    Args:
        given: The grid, as `Grid.from_dict` takes it, without moments.
        reporter: Told of the progress.
        options: What to look at.
        command: What the summary says that made it.

    Raises:
        UserError: Something is unknown, out of range, or cannot be written to.
    """
    if (options.text is None) == ("task" not in given and "tasks" not in given):
        raise UserError("give either --task or --text")
    named = {} if options.text is None else {"tasks": "text"}
    grid = make_grid({"samples": SAMPLES, **given, **named, "moments": "context"})
    path = folder_of(grid, "retention", options.to_dict())
    found = analyze(grid, options, reporter)
    traced = any(shown.traces for task in found.tasks for shown in task.shown)
    if found.failed and not traced:
        reason = " ".join(next(iter(found.failed.values())).split())
        raise UserError(f"nothing to show: all policies failed: {reason}")
    data = frames(found)
    drawn = draw(found, path / "figures")
    tables = list(retention_tables(found))
    lines = [line for name, line in READING.items() if name in data]
    if found.ungated:
        without = "no retention gates, so no retention matrices, sparsity or table of tokens"
        lines.append(f"{listed(found.ungated)}: {without}")
    lines += notes(data["survival"], found.failed)
    settings = {"analysis": "retention", **options.to_dict(), "moments": [options.moment]}
    settings["tasks"] = [] if options.text is not None else list(grid.tasks)
    figures = [p for one in drawn for p in one.paths]
    done = write_all(
        path, grid, settings, data, tables, lines, figures, command, found.failed, _AS_CSV
    )
    whole = path / "retention.html"
    with replacing(whole) as part:
        part.write_text(page(found, command, tables, lines, drawn), encoding="utf-8")
    summary, *others = done.files
    return replace(done, files=[summary, whole, *others])
