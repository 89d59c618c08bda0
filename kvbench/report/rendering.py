"""Rendering of reports: figures, tables and a summary."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from kvbench.errors import UserError
from kvbench.files import cannot, replacing
from kvbench.progress import Reporter
from kvbench.report.choosing import WITHIN_A_POINT, Aim
from kvbench.report.drawn import report_figures
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.report.frames import Results, prepare
from kvbench.report.summary import summary_text
from kvbench.report.table_files import report_tables, write_tables


def render(
    cells: pd.DataFrame,
    samples: pd.DataFrame,
    out_dir: str | os.PathLike[str],
    aim: Aim = WITHIN_A_POINT,
    figure_options: FigureOptions = DEFAULT_FIGURES,
) -> list[Path]:
    """Write the report of one or several runs.

    The same frames give the same bytes, figures included. Figures that the folder has already are not drawn again; all
    other files are replaced, atomically, so a full disk leaves no empty files.

    Args:
        cells: The frame of `cells.parquet`; for several runs, concatenated.
        samples: The frame of `samples.parquet`.
        out_dir: Output folder, created if needed.
        aim: Requirements for the choice of a setting.
        figure_options: Formats, sizes and policies of the figures; tables have all policies.

    Returns:
        The files of the report: `summary.md` first, then the files of every figure in `figures/`, then CSV and LaTeX of
        every table in `tables/`.

    Raises:
        UserError: The folder or a file in it cannot be written, or the results lack a policy of the figures.
    """
    return write_report(prepare(cells, samples), Path(out_dir), aim, figure_options)


def write_report(
    results: Results,
    output_folder: Path,
    aim: Aim = WITHIN_A_POINT,
    figure_options: FigureOptions = DEFAULT_FIGURES,
    reporter: Reporter | None = None,
) -> list[Path]:
    """Write the report for prepared results, with a progress reporter; see `render`."""
    figure_options.check(results)
    folders = output_folder / "figures", output_folder / "tables"
    try:
        if output_folder.exists() and not output_folder.is_dir():
            raise UserError(f"cannot write {output_folder}: it is a file, not a folder")
        for subfolder in folders:
            subfolder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", error.filename or output_folder, error) from None
    figures = report_figures(results, folders[0], figure_options, reporter)
    tables = report_tables(results)
    written_paths = [figure_path for figure in figures for figure_path in figure.paths]
    written_paths += write_tables(tables, folders[1])
    summary_path = output_folder / "summary.md"
    with replacing(summary_path) as partial_path:
        partial_path.write_text(summary_text(results, tables, figures, output_folder, aim), encoding="utf-8")
    return [summary_path, *written_paths]
