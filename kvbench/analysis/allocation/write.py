"""From a grid to files: counts what allocators give and writes tables and figures."""

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
    """Count what allocators give and write `allocation.parquet`.

    Args:
        grid_options: The grid, as `Grid.from_dict` takes it.
        reporter: Told of the progress.
        command: What the summary says that made it.

    Raises:
        UserError: Something in the grid is unknown, out of range, or cannot be written to.
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
