"""Perturbation analysis from a grid to tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.analysis.common import make_grid
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, require_results, write_all
from kvbench.analysis.perturbation import comparison, probe
from kvbench.analysis.perturbation.figures import draw_perturbation, shown_pairs
from kvbench.analysis.perturbation.options import PerturbationOptions
from kvbench.analysis.perturbation.tables import READING, perturbation_tables
from kvbench.analysis.summary import notes
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags


def write_perturbation(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    query: str = "answer",
    first_stage: float = 0.5,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench analyze perturbation",
) -> AnalysisOutput:
    """Measure output perturbation and write `heads`, `layers`, `pairs` and `policies.parquet`.

    Args:
        grid_options: Grid options, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        query: Query to measure.
        first_stage: Fraction for stage 1, for policies without a parameter of that name.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value in the grid is unknown or out of range, or the output is not writable.
    """
    grid = make_grid(grid_options)
    PerturbationOptions(query, first_stage)
    folder, figure_settings = prepare_output(grid, "perturbation", figures, query, first_stage)
    perturbation = probe.analyze(grid, reporter, query=query, first_stage=first_stage)
    require_results(perturbation.heads, perturbation.failed)
    pairs, cells = comparison.pairs(perturbation.heads), comparison.cells(perturbation.heads)
    frames = {
        "heads": perturbation.heads,
        "layers": perturbation.layers,
        "pairs": pairs,
        "policies": cells,
    }
    findings = Findings(
        frames,
        list(perturbation_tables(cells, pairs, shown_pairs(pairs))),
        notes(cells, perturbation.failed, READING),
        draw_perturbation(perturbation.heads, perturbation.layers, pairs, cells, folder / "figures", figure_settings),
        perturbation.failed,
    )
    return write_all(
        folder, grid, {"analysis": "perturbation", "query": query, "first_stage": first_stage}, findings, command
    )
