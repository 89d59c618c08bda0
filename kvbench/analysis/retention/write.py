"""Retention analysis from flags to tables, figures, summary and page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbench.analysis.common import make_grid
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, write_all
from kvbench.analysis.retention.options import RetentionOptions
from kvbench.analysis.retention.page import page
from kvbench.analysis.retention.plots import draw
from kvbench.analysis.retention.survival import analyze
from kvbench.analysis.retention.tables import READING, frames, retention_tables
from kvbench.analysis.summary import notes
from kvbench.errors import UserError
from kvbench.files import replacing
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.tables.text import listed

SAMPLES = 4
"""Default number of texts per task."""

_AS_CSV = ("sparsity", "tokens")


def write_retention(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    options: RetentionOptions,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench analyze retention",
) -> AnalysisOutput:
    """Run the retention analysis and write all tables, figures, `summary.md` and a page.

    Args:
        grid_options: Grid options without moments, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        options: Options of the analysis.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value is unknown or out of range, or the output is not writable.
    """
    if (options.text is None) == ("task" not in grid_options and "tasks" not in grid_options):
        raise UserError("give either --task or --text")
    text_task = {} if options.text is None else {"tasks": "text"}
    grid = make_grid({"samples": SAMPLES, **grid_options, **text_task, "moments": "context"})
    folder, figure_settings = prepare_output(grid, "retention", figures, options.to_dict())
    result = analyze(grid, options, reporter)
    has_traces = any(sample.traces for task in result.tasks for sample in task.samples)
    if result.failed and not has_traces:
        reason = " ".join(next(iter(result.failed.values())).split())
        raise UserError(f"nothing to show: all policies failed: {reason}")
    data_frames = frames(result)
    saved_figures = draw(result, folder / "figures", figure_settings)
    tables = list(retention_tables(result))
    note_lines = [note_line for table_name, note_line in READING.items() if table_name in data_frames]
    if result.ungated:
        missing = "no retention gates, so no retention matrices, sparsity or table of tokens"
        note_lines.append(f"{listed(result.ungated)}: {missing}")
    note_lines += notes(data_frames["survival"], result.failed)
    settings = {"analysis": "retention", **options.to_dict(), "moments": [options.moment]}
    settings["tasks"] = [] if options.text is not None else list(grid.tasks)
    figure_paths = [figure_path for figure in saved_figures for figure_path in figure.paths]
    findings = Findings(
        data_frames,
        tables,
        note_lines,
        figure_paths,
        result.failed,
        _AS_CSV,
    )
    output = write_all(folder, grid, settings, findings, command)
    html_path = folder / "retention.html"
    with replacing(html_path) as temporary_path:
        temporary_path.write_text(page(result, command, tables, note_lines, saved_figures), encoding="utf-8")
    summary_path, *other_files = output.files
    return replace(output, files=[summary_path, html_path, *other_files])
