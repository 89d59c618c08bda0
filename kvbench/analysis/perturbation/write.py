"""From a grid to files: measures output perturbation and writes its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.analysis.common import make_grid
from kvbench.analysis.perturbation import comparison, probe
from kvbench.analysis.perturbation.figures import draw_perturbation, shown_pairs
from kvbench.analysis.perturbation.tables import READING, perturbation_tables
from kvbench.analysis.summary import notes
from kvbench.analysis.write import AnalysisOutput, make_output_folder, require_results, write_all
from kvbench.progress import Reporter


def write_perturbation(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    query: str = "answer",
    first_stage: float = 0.5,
    command: str = "kvbench analyze perturbation",
) -> AnalysisOutput:
    """Measure output perturbation and write `heads`, `layers`, `pairs` and `cells.parquet`.

    Args:
        grid_options: The grid, as `Grid.from_dict` takes it.
        reporter: Told of the progress.
        query: Which query is measured.
        first_stage: Share of stage 1 for policies that have no parameter of that name.
        command: What the summary says that made it.

    Raises:
        UserError: Something in the grid is unknown, out of range, or cannot be written to.
    """
    grid = make_grid(grid_options)
    query_kind = probe.check(query, first_stage)
    folder = make_output_folder(grid, "perturbation", query, first_stage)
    perturbation = probe.analyze(grid, reporter, query=query_kind, first_stage=first_stage)
    require_results(perturbation.heads, perturbation.failed)
    pairs, cells = comparison.pairs(perturbation.heads), comparison.cells(perturbation.heads)
    frames = {
        "heads": perturbation.heads,
        "layers": perturbation.layers,
        "pairs": pairs,
        "cells": cells,
    }
    return write_all(
        folder,
        grid,
        {"analysis": "perturbation", "query": query, "first_stage": first_stage},
        frames,
        list(perturbation_tables(cells, pairs, shown_pairs(pairs))),
        notes(cells, perturbation.failed, READING),
        draw_perturbation(perturbation.heads, perturbation.layers, pairs, cells, folder / "figures"),
        command,
        perturbation.failed,
    )
