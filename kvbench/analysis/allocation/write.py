"""Allocation analysis from a grid to tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.analysis.allocation.count import analyze
from kvbench.analysis.allocation.figures import draw_allocation
from kvbench.analysis.allocation.tables import allocation_tables
from kvbench.analysis.common import make_grid
from kvbench.analysis.summary import notes
from kvbench.analysis.write import AnalysisOutput, make_output_folder, require_results, write_all
from kvbench.progress import Reporter


def write_allocation(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    command: str = "kvbench analyze allocation",
) -> AnalysisOutput:
    """Run the allocation analysis and write `allocation.parquet`.

    Args:
        grid_options: Grid options, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        command: Command shown in the summary.

    Raises:
        UserError: A value in the grid is unknown or out of range, or the output is not writable.
    """
    grid = make_grid(grid_options)
    folder = make_output_folder(grid, "allocation")
    allocation = analyze(grid, reporter)
    require_results(allocation.table, allocation.failed)
    return write_all(
        folder,
        grid,
        {"analysis": "allocation"},
        {"allocation": allocation.table},
        list(allocation_tables(allocation.table)),
        notes(allocation.table, allocation.failed),
        draw_allocation(allocation.table, folder / "figures"),
        command,
        allocation.failed,
    )
