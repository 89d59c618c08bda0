"""Writes the report of one or several runs: figures, tables and a summary."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from kvbench.errors import UserError
from kvbench.files import cannot, replacing
from kvbench.report.choosing import WITHIN_A_POINT, Aim
from kvbench.report.figures import draw_fronts
from kvbench.report.frames import Results, prepare
from kvbench.report.heatmap import draw_heatmaps
from kvbench.report.summary import summary_text
from kvbench.report.tables import report_tables, write_tables


def render(
    cells: pd.DataFrame,
    samples: pd.DataFrame,
    out_dir: str | os.PathLike[str],
    aim: Aim = WITHIN_A_POINT,
) -> list[Path]:
    """Write the report of one or several runs.

    The same frames give the same bytes, figures included. Every file is written aside first, so a
    full disk leaves no empty files.

    Args:
        cells: The frame of `cells.parquet`, of several runs one under the other.
        samples: The frame of `samples.parquet`.
        out_dir: Where to write; created if needed. Files of the same names are replaced.
        aim: What a setting is looked for.

    Returns:
        The files written: `summary.md` first, then PNG and SVG of every figure in `figures/`, then
        CSV and LaTeX of every table in `tables/`.

    Raises:
        UserError: The folder or a file in it cannot be written.
    """
    return write_report(prepare(cells, samples), Path(out_dir), aim)


def write_report(results: Results, out: Path, aim: Aim = WITHIN_A_POINT) -> list[Path]:
    """`render` of what `prepare` has prepared."""
    folders = out / "figures", out / "tables"
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"cannot write {out}: it is a file, not a folder")
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", error.filename or out, error) from None
    figures = draw_fronts(results, folders[0]) + draw_heatmaps(results, folders[0])
    tables = report_tables(results)
    paths = [path for figure in figures for path in figure.paths]
    paths += write_tables(tables, folders[1])
    summary = out / "summary.md"
    with replacing(summary) as part:
        part.write_text(summary_text(results, tables, figures, out, aim), encoding="utf-8")
    return [summary, *paths]
