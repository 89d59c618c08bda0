"""From a grid to files: counts what allocators give and writes tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.analysis.allocation.count import analyze
from kvbench.analysis.allocation.figures import draw_allocation
from kvbench.analysis.allocation.tables import allocation_tables
from kvbench.analysis.common import make_grid
from kvbench.analysis.summary import notes
from kvbench.analysis.write import Done, check_any, folder_of, write_all
from kvbench.progress import Reporter


def write_allocation(
    given: Mapping[str, Any],
    reporter: Reporter,
    *,
    command: str = "kvbench analyze allocation",
) -> Done:
    """Count what allocators give and write `allocation.parquet`.

    Args:
        given: The grid, as `Grid.from_dict` takes it.
        reporter: Told of the progress.
        command: What the summary says that made it.

    Raises:
        UserError: Something in the grid is unknown, out of range, or cannot be written to.
    """
    grid = make_grid(given)
    path = folder_of(grid, "allocation")
    found = analyze(grid, reporter)
    check_any(found.table, found.failed)
    return write_all(
        path,
        grid,
        {"analysis": "allocation"},
        {"allocation": found.table},
        list(allocation_tables(found.table)),
        notes(found.table, found.failed),
        draw_allocation(found.table, path / "figures"),
        command,
        found.failed,
    )
