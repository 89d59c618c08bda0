"""Figures of a report, drawn only if they would differ from those of an earlier report in the same folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from kvbench import registry
from kvbench.files import digest_of, file_digests, store_json
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
    """
    shown = _digest_of_shown(results, options)
    if (kept_figures := _kept(folder, shown)) is not None:
        return kept_figures
    from kvbench.report.heatmap import draw_heatmaps  # matplotlib, which figures that are kept do not need
    from kvbench.report.pareto_figures import draw_fronts

    figures = draw_fronts(results, folder, options, reporter) + draw_heatmaps(results, folder, options, reporter)
    records = [
        {"title": figure.title, "task": figure.task, "files": [path.name for path in figure.paths]}
        for figure in figures
    ]
    store_json(folder / _RECORD, {"shown": shown, "figures": records, "digests": _digests(figures)})
    return figures


def _digest_of_shown(results: Results, options: FigureOptions) -> str:
    """Return a digest of all that figures depend on: numbers, options, and the code that draws them."""
    frames = (results.cells, results.overall, with_depth(results))
    return digest_of(
        [
            [[[*map(str, frame.columns)], pd.util.hash_pandas_object(frame, index=False).tolist()] for frame in frames],
            results.policies,
            asdict(options),
            registry.code_state(),
            version("matplotlib"),
        ]
    )


def _kept(folder: Path, shown: str) -> list[SavedFigure] | None:
    """Return the figures in a folder; None if they show something else, or a file is missing or was changed."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        if record["shown"] != shown:
            return None
        figures = [
            SavedFigure(str(entry["title"]), [folder / str(name) for name in entry["files"]], str(entry["task"]))
            for entry in record["figures"]
        ]
        return figures if _digests(figures) == record["digests"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digests(figures: list[SavedFigure]) -> list[str]:
    return file_digests(path for figure in figures for path in figure.paths)
