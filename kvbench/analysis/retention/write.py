"""From flags to files: carries the analysis out, writes its tables, figures, summary and page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.analysis import text
from kvbench.analysis.common import folder_of, make_grid, write_settings, write_table
from kvbench.analysis.retention.measure import analyze
from kvbench.analysis.retention.options import Options
from kvbench.analysis.retention.page import page
from kvbench.analysis.retention.pictures import draw
from kvbench.analysis.retention.tables import READING, frames, grids
from kvbench.analysis.write import Done
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.report.text import listed
from kvbench.runs.grid import Grid

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
        raise UserError("give either --task or --text, whose text is looked at")
    named = {} if options.text is None else {"tasks": "text"}
    grid = make_grid({"samples": SAMPLES, **given, **named, "moments": "context"})
    path = folder_of(grid.out, _default(grid, options))
    found = analyze(grid, options, reporter)
    traced = any(shown.traces for task in found.tasks for shown in task.shown)
    if found.failed and not traced:
        reason = " ".join(next(iter(found.failed.values())).split())
        raise UserError(f"nothing to show: all policies failed: {reason}")
    tables = frames(found)
    drawn = draw(found, path / "figures")
    shown = list(grids(found))
    notes = [line for name, line in READING.items() if name in tables]
    notes += [*_ungated(found.ungated), *text.notes(tables["survival"], found.failed)]
    figures = [p for one in drawn for p in one.paths]
    try:
        files = [write_table(frame, path / f"{name}.parquet") for name, frame in tables.items()]
        files += [_csv(tables[name], path / f"{name}.csv") for name in _AS_CSV if name in tables]
        mine = {"analysis": "retention", **options.to_dict(), "moments": [options.moment]}
        mine["tasks"] = [] if options.text is not None else list(grid.tasks)
        files.append(write_settings(grid, path / "settings.json", **mine))
        summary, whole = path / "summary.md", path / "retention.html"
        said = text.markdown("kvbench retention", command, shown, notes, figures, path)
        summary.write_text(said, encoding="utf-8")
        whole.write_text(page(found, command, shown, notes, drawn), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename or path}: {error.strerror}") from None
    return Done(path, [summary, whole, *files, *figures], shown, notes, found.failed)


def _ungated(policies: list[str]) -> list[str]:
    if not policies:
        return []
    return [
        f"{listed(policies)}: no retention gates, so no retention matrices, sparsity or table of "
        "tokens"
    ]


def _csv(frame: pd.DataFrame, path: Path) -> Path:
    frame.to_csv(path, index=False)
    return path


def _default(grid: Grid, options: Options) -> Path:
    """A folder of its own for everything that changes a number, `--samples` apart."""
    value = json.dumps([grid.digest, options.to_dict()])
    return Path("results") / f"retention-{hashlib.sha256(value.encode()).hexdigest()[:16]}"
