"""Reports: Pareto fronts, the NIAH heat map, a table for the terminal and a Markdown summary."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from kvbench.errors import UserError
from kvbench.report.frames import prepare
from kvbench.report.overall import group_means
from kvbench.report.tables import run_table

__all__ = ["group_means", "render", "run_table"]


def render(
    cells: pd.DataFrame, samples: pd.DataFrame, out_dir: str | os.PathLike[str]
) -> list[Path]:
    """Write the report of one or several runs.

    The same frames give the same bytes, figures included.

    Args:
        cells: The frame of `cells.parquet`, of several runs one under the other.
        samples: The frame of `samples.parquet`.
        out_dir: Where to write; made if it is absent. Files of the same names are replaced.

    Returns:
        The files written: `summary.md` first, then PNG and SVG of every figure in `figures/`.

    Raises:
        UserError: The folder or a file in it cannot be written.
    """
    from kvbench.report.figures import draw_fronts
    from kvbench.report.heatmap import draw_heatmaps
    from kvbench.report.markdown import summary_text

    out = Path(out_dir)
    folder = out / "figures"
    results = prepare(cells, samples)
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"cannot write {out}: it is a file, not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        figures = draw_fronts(results, folder) + draw_heatmaps(results, folder)
        summary = out / "summary.md"
        summary.write_text(summary_text(results, figures, out), encoding="utf-8")
    except OSError as error:
        where, reason = error.filename or out, error.strerror or error
        raise UserError(f"cannot write {where}: {reason}") from None
    return [summary, *figures]
