"""From flags to files: carries the analysis out and writes its tables, figures and summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.analysis.common import make_grid
from kvbench.analysis.summary import notes
from kvbench.analysis.vision.figures import draw
from kvbench.analysis.vision.measure import analyze
from kvbench.analysis.vision.options import MOMENTS, Options
from kvbench.analysis.vision.tables import READING, frames, vision_tables
from kvbench.analysis.write import Done, check_any, folder_of, write_all
from kvbench.progress import Reporter
from kvbench.report.text import listed

SAMPLES = 1
"""Samples of a task, where nobody says how many: every one has pictures of its own."""

_AS_CSV = ("answers", "steps")


def write_vision(
    given: Mapping[str, Any],
    reporter: Reporter,
    *,
    options: Options,
    command: str = "kvbench analyze vision",
) -> Done:
    """Look at what is kept of images and write all tables, figures and `summary.md`.

    Args:
        given: The grid, as `Grid.from_dict` takes it.
        reporter: Told of the progress.
        options: What to look at.
        command: What the summary says that made it.

    Raises:
        UserError: Something is unknown, out of range, or cannot be written to.
    """
    grid = make_grid({"samples": SAMPLES, **given}, MOMENTS, pruning=True)
    path = folder_of(grid, "vision", options.to_dict())
    found = analyze(grid, options, reporter)
    data = frames(found)
    check_any(data.get("answers", []), found.failed)
    tables = list(vision_tables(data))
    lines = [*READING]
    if found.undrawn:
        why = "it is not known where the tokens of its images lie"
        lines.append(f"{listed(found.undrawn)}: no pictures, because {why}")
    lines = notes(data["answers"], found.failed, lines)
    figures = draw(found, path / "figures")
    settings = {"analysis": "vision", **options.to_dict()}
    return write_all(
        path, grid, settings, data, tables, lines, figures, command, found.failed, _AS_CSV
    )
