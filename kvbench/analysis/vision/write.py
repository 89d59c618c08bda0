"""Vision analysis from flags to tables, figures and summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.analysis.common import make_grid
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, require_results, write_all
from kvbench.analysis.summary import notes
from kvbench.analysis.vision.figures import draw
from kvbench.analysis.vision.image_shares import analyze
from kvbench.analysis.vision.options import MOMENTS, VisionOptions
from kvbench.analysis.vision.tables import READING, frames, vision_tables
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.tables.text import listed

SAMPLES = 1
"""Default number of samples per task; each has its own figures."""

_AS_CSV = ("answers", "steps")


def write_vision(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    options: VisionOptions,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench analyze vision",
) -> AnalysisOutput:
    """Run the vision analysis and write all tables, figures and `summary.md`.

    Args:
        grid_options: Grid options, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        options: Options of the analysis.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value is unknown or out of range, or the output is not writable.
    """
    grid = make_grid({"samples": SAMPLES, **grid_options}, MOMENTS, pruning=True)
    folder, figure_settings = prepare_output(grid, "vision", figures, options.to_dict())
    result = analyze(grid, options, reporter)
    data_frames = frames(result)
    require_results(data_frames.get("answers", []), result.failed)
    tables = list(vision_tables(data_frames))
    note_lines = [*READING]
    if result.undrawn:
        reason = "it is not known where the tokens of its images lie"
        note_lines.append(f"{listed(result.undrawn)}: no pictures, because {reason}")
    note_lines = notes(data_frames["answers"], result.failed, note_lines)
    figure_paths = draw(result, folder / "figures", figure_settings)
    settings = {"analysis": "vision", **options.to_dict()}
    findings = Findings(
        data_frames,
        tables,
        note_lines,
        figure_paths,
        result.failed,
        _AS_CSV,
    )
    return write_all(folder, grid, settings, findings, command)
