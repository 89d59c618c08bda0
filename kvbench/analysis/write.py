"""From a grid to files: carries out an analysis, writes its tables, figures and summary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.analysis import allocation, compare, figures, perturbation, text
from kvbench.analysis.common import folder_of, make_grid, write_settings, write_table
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.runs.grid import Grid


@dataclass(frozen=True)
class Done:
    """What an analysis has made.

    Attributes:
        path: The folder.
        files: All files written, the summary first.
        tables: What to show in a terminal.
        notes: Lines to show below them.
        failed: Why cells failed, by cell id.
    """

    path: Path
    files: list[Path]
    tables: list[text.Grid]
    notes: list[str]
    failed: Mapping[str, str]


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
    wanted = perturbation.check(query, first_stage)
    path = folder_of(grid.out, _default("perturbation", grid, query, first_stage))
    found = perturbation.analyze(grid, reporter, query=wanted, first_stage=first_stage)
    _something(found.heads, found.failed)
    pairs, cells = compare.pairs(found.heads), compare.cells(found.heads)
    frames = {"heads": found.heads, "layers": found.layers, "pairs": pairs, "cells": cells}
    drawn = figures.draw_perturbation(found.heads, found.layers, pairs, cells, path / "figures")
    shown = figures.shown_pairs(pairs) if len(pairs) else []
    grids = list(text.perturbation_tables(cells, pairs, shown))
    notes = text.notes(cells, found.failed, text.READING)
    settings = {"analysis": "perturbation", "query": query, "first_stage": first_stage}
    return _written(path, grid, settings, frames, drawn, grids, notes, command, found.failed)


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
    path = folder_of(grid.out, _default("allocation", grid))
    found = allocation.analyze(grid, reporter)
    _something(found.table, found.failed)
    drawn = figures.draw_allocation(found.table, path / "figures")
    grids = list(text.allocation_tables(found.table))
    notes = text.notes(found.table, found.failed)
    frames = {"allocation": found.table}
    settings = {"analysis": "allocation"}
    return _written(path, grid, settings, frames, drawn, grids, notes, command, found.failed)


def _written(
    path: Path,
    grid: Grid,
    settings: dict[str, Any],
    frames: dict[str, pd.DataFrame],
    drawn: list[Path],
    grids: list[text.Grid],
    notes: list[str],
    command: str,
    failed: Mapping[str, str],
) -> Done:
    try:
        tables = [write_table(frame, path / f"{name}.parquet") for name, frame in frames.items()]
        saved = write_settings(grid, path / "settings.json", **settings)
        summary = path / "summary.md"
        page = text.markdown(f"kvbench {settings['analysis']}", command, grids, notes, drawn, path)
        summary.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {error.filename or path}: {error.strerror}") from None
    return Done(path, [summary, *tables, saved, *drawn], grids, notes, failed)


def _default(name: str, grid: Grid, *more: object) -> Path:
    """A folder of its own for everything that changes a number, `--samples` apart."""
    value = json.dumps([grid.digest, *more])
    return Path("results") / f"{name}-{hashlib.sha256(value.encode()).hexdigest()[:16]}"


def _something(frame: pd.DataFrame, failed: Mapping[str, str]) -> None:
    if not len(frame):
        reason = " ".join(next(iter(failed.values()), "no cell was run").split())
        raise UserError(f"nothing to show: all {len(failed)} cells failed: {reason}")
