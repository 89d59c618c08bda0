"""Runs that differ in a known way, as frames and as folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from kvbench.runs.store import RunStore

from ..report.conftest import Frames, make_run

POLICIES = ("snapkv", "keydiff")
TASKS = ("vt", "cwe")


def usual(samples: int = 40, **changes: object) -> Frames:
    """A run of 2 policies at 2 budgets on 2 tasks, with full: 10 cells."""
    given = {"policies": POLICIES, "budgets": ("0.2", "0.4"), "tasks": TASKS} | changes
    return make_run(samples=samples, **given)  # type: ignore[arg-type]


def rescored(
    frames: Frames,
    scores: list[float],
    *,
    task: str = "vt",
    policy: str = "snapkv",
    budget: str = "0.2",
    response: str = "other",
) -> Frames:
    """The run with other scores of the first samples of a cell, and so other responses."""
    cells, samples = frames[0].copy(), frames[1].copy()
    here = (samples["task"] == task) & (samples["policy"] == policy) & (samples["budget"] == budget)
    rows = samples.index[here][: len(scores)]
    samples.loc[rows, "score"] = scores
    samples.loc[rows, "response"] = response
    return cells, samples


def one_cell(scores: list[float], *, higher: bool = True, contexts: int = 0) -> Frames:
    """A run of one cell with given scores; with `contexts`, samples share that many contexts."""
    cells, samples = make_run(("snapkv",), ("0.2",), ("vt",), samples=len(scores), with_full=False)
    cells["higher_is_better"] = higher
    samples["score"] = np.asarray(scores, dtype=float)
    samples["response"] = [f"{score}" for score in scores]
    if contexts:
        samples["context_id"] = [f"c{i % contexts:03d}" for i in range(len(scores))]
    return cells, samples


def save(frames: Frames, folder: Path) -> Path:
    """Write the run as `kvbench run` does."""
    with RunStore(folder) as store:
        store.save_grid({"policies": ["snapkv"]})
        store.write(*frames)
    return folder


def without(frames: Frames, **columns: str) -> Frames:
    """The run without the cells that have all of these values."""
    cells, samples = frames
    gone = pd.Series(True, index=cells.index)
    for name, value in columns.items():
        gone &= cells[name] == value
    return cells[~gone], samples
