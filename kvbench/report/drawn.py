"""Figures of a report, drawn only if they would differ from those of an earlier report in the same folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.files import digest_of, file_digests, stored_json
from kvbench.progress import Reporter
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.report.frames import Results, with_depth
from kvbench.tables.figure_files import SavedFigure

_RECORD = ".drawn.json"
"""File beside the figures: what they show, their titles and their digests."""


def report_figures(
    results: Results, folder: Path, options: FigureOptions = DEFAULT_FIGURES, reporter: Reporter | None = None
) -> list[SavedFigure]:
    """Draw fronts and heat maps, or keep those in the folder if they show the same and nobody has changed them.

    Args:
        results, folder, options, reporter: As for `kvbench.report.pareto_figures.draw_fronts`.

    Returns:
        All figures of the report.

    Raises:
        UserError: A file cannot be written, or the results lack a policy of the figures.
        OSError: Somebody removes a file meanwhile.
    """
    results = options.select(results)
    shown = _digest_of_shown(results, options)

    def draw() -> dict[str, Any]:
        from kvbench.report.heatmap import draw_heatmaps  # matplotlib, which figures that are kept do not need
        from kvbench.report.pareto_figures import draw_fronts

        figures = draw_fronts(results, folder, options, reporter) + draw_heatmaps(results, folder, options, reporter)
        records = [[figure.title, [path.name for path in figure.paths], figure.task] for figure in figures]
        return {"shown": shown, "figures": records, "digests": _digests(figures)}

    def of_record(record: dict[str, Any]) -> list[SavedFigure]:
        figures = [
            SavedFigure(title, [folder / name for name in names], task) for title, names, task in record["figures"]
        ]
        if record["shown"] != shown or record["digests"] != _digests(figures):
            raise ValueError("the figures show something else, or a file was changed")
        return figures

    with _locked(folder):
        return stored_json(folder / _RECORD, draw, of_record)


def _digest_of_shown(results: Results, options: FigureOptions) -> str:
    """Return a digest of what figures depend on: numbers, options, and kvbench's and matplotlib's code."""
    frames = (results.cells, results.overall, with_depth(results))
    texts = [frame.to_csv(index=False) for frame in frames]
    return digest_of([texts, results.policies, repr(options), registry.code_state(), version("matplotlib")])


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process draws in a folder: the record of one must not count the files of the other."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digests(figures: list[SavedFigure]) -> list[str]:
    return file_digests(path for figure in figures for path in figure.paths)
