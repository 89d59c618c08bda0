"""From a grid to files: measures output perturbation and writes its tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.analysis.common import make_grid
from kvbench.analysis.perturbation import compare, probe
from kvbench.analysis.perturbation.figures import draw_perturbation, shown_pairs
from kvbench.analysis.perturbation.tables import READING, perturbation_tables
from kvbench.analysis.summary import notes
from kvbench.analysis.write import Done, check_any, folder_of, write_all
from kvbench.progress import Reporter


def write_perturbation(
    given: Mapping[str, Any],
    reporter: Reporter,
    *,
    query: str = "answer",
    first_stage: float = 0.5,
    command: str = "kvbench analyze perturbation",
) -> Done:
    """Measure output perturbation and write `heads`, `layers`, `pairs` and `cells.parquet`.

    Args:
        given: The grid, as `Grid.from_dict` takes it.
        reporter: Told of the progress.
        query: Which query is measured.
        first_stage: Share of stage 1 for policies that have no parameter of that name.
        command: What the summary says that made it.

    Raises:
        UserError: Something in the grid is unknown, out of range, or cannot be written to.
    """
    grid = make_grid(given)
    wanted = probe.check(query, first_stage)
    path = folder_of(grid, "perturbation", query, first_stage)
    found = probe.analyze(grid, reporter, query=wanted, first_stage=first_stage)
    check_any(found.heads, found.failed)
    pairs, cells = compare.pairs(found.heads), compare.cells(found.heads)
    frames = {"heads": found.heads, "layers": found.layers, "pairs": pairs, "cells": cells}
    return write_all(
        path,
        grid,
        {"analysis": "perturbation", "query": query, "first_stage": first_stage},
        frames,
        list(perturbation_tables(cells, pairs, shown_pairs(pairs))),
        notes(cells, found.failed, READING),
        draw_perturbation(found.heads, found.layers, pairs, cells, path / "figures"),
        command,
        found.failed,
    )
