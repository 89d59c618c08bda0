"""Agreement between publications that measured the same cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from kvbench import stats
from kvbench.regression.pairs import made_differently
from kvbench.report.frames import records
from kvbench.report.sorted_samples import Samples

CellKey = tuple[int, str]
"""Index of a publication, and the hash of a cell in it."""


@dataclass(frozen=True)
class Disagreement:
    """A difference between two publications of a cell whose 95% interval excludes zero.

    Attributes:
        other: Index of the other publication.
        task: The task.
        difference: This score minus the other one, with its interval.
        is_paired: Whether the difference is over common questions; otherwise the two intervals are combined.
        settings: Versions and settings that differ, by name: here and in the other publication.
    """

    other: int
    task: str
    difference: stats.Difference
    is_paired: bool
    settings: Mapping[str, tuple[str, str]]


@dataclass
class Agreement:
    """What publications say of the cells that several of them measured.

    Attributes:
        compared_count: Number of pairs of cells compared.
        disagreements: Disagreements by cell; those of a pair are under both cells.
    """

    compared_count: int = 0
    disagreements: dict[CellKey, list[Disagreement]] = field(default_factory=dict)


def compare_publications(frames: Sequence[tuple[pd.DataFrame, pd.DataFrame]]) -> Agreement:
    """Compare every cell that several publications measured, by its hash `match`.

    Cells that failed or were scored by another metric are not compared.

    Args:
        frames: Cells and samples of each publication.
    """
    rows_by_match: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for index, (cells, _) in enumerate(frames):
        for row in records(cells[cells["status"] == "ok"]):
            rows_by_match.setdefault((str(row["match"]), str(row["metric"])), []).append((index, row))
    shared_rows = [rows for rows in rows_by_match.values() if len({index for index, _ in rows}) > 1]
    samples = _shared_samples(frames, (entry for rows in shared_rows for entry in rows))
    agreement = Agreement()
    for rows in shared_rows:
        for (index, row), (other_index, other_row) in combinations(rows, 2):
            if index == other_index:
                continue
            agreement.compared_count += 1
            difference, is_paired = _difference(samples, (index, row), (other_index, other_row))
            if difference.lo <= 0 <= difference.hi or math.isnan(difference.mean):
                continue
            settings = made_differently(pd.DataFrame([row]), pd.DataFrame([other_row]))
            here = Disagreement(other_index, str(row["task"]), difference, is_paired, settings)
            there = replace(
                here,
                other=index,
                difference=stats.Difference(-difference.mean, -difference.hi, -difference.lo, difference.n),
                settings={name: (other_value, value) for name, (value, other_value) in settings.items()},
            )
            agreement.disagreements.setdefault((index, str(row["cell"])), []).append(here)
            agreement.disagreements.setdefault((other_index, str(other_row["cell"])), []).append(there)
    return agreement


def _shared_samples(
    frames: Sequence[tuple[pd.DataFrame, pd.DataFrame]], entries: Iterable[tuple[int, Mapping[str, Any]]]
) -> Samples:
    """Return the samples of some cells of all publications, whose cells are named by `_cell_name`."""
    cells_by_index: dict[int, list[str]] = {}
    for index, row in entries:
        cells_by_index.setdefault(index, []).append(str(row["cell"]))
    parts = []
    for index, cells in cells_by_index.items():
        samples = frames[index][1]
        shared = samples[samples["cell"].isin(cells)].astype({"sample_id": str, "context_id": str})
        parts.append(shared.assign(cell=[_cell_name(index, cell) for cell in shared["cell"]]))
    return Samples(pd.concat(parts, ignore_index=True) if parts else frames[0][1].iloc[:0])


def _cell_name(index: int, cell: object) -> str:
    return f"{index}:{cell}"


def _difference(
    samples: Samples, first: tuple[int, Mapping[str, Any]], second: tuple[int, Mapping[str, Any]]
) -> tuple[stats.Difference, bool]:
    """Return the difference of two cells, paired if they share questions and their scores are means."""
    rows = (first[1], second[1])
    if all(row["is_mean"] for row in rows):
        scores, contexts = samples.wide(_cell_name(index, row["cell"]) for index, row in (first, second))
        is_shared = np.isfinite(scores).all(1)
        if is_shared.any():
            shared_scores, shared_contexts = scores[is_shared], contexts[is_shared].astype(np.int64)
            return stats.paired_values(shared_scores[:, 0], shared_scores[:, 1], shared_contexts), True
    mean = rows[0]["score"] - rows[1]["score"]
    # Square-and-add, as for the mean over tasks: the intervals of independent scores.
    below = math.hypot(rows[0]["score"] - rows[0]["score_lo"], rows[1]["score_hi"] - rows[1]["score"])
    above = math.hypot(rows[0]["score_hi"] - rows[0]["score"], rows[1]["score"] - rows[1]["score_lo"])
    return stats.Difference(mean, mean - below, mean + above), False
