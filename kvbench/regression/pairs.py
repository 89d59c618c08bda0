"""Which cells of two runs measure the same, and the scores that both have."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvbench import stats
from kvbench.errors import UserError
from kvbench.report.frames import answers, recorded, records

Key: TypeAlias = tuple[str, int, int]
"""Sample, question and repeat: what two cells are paired by."""
Frames: TypeAlias = tuple[pd.DataFrame, pd.DataFrame]
"""The frames of `cells.parquet` and `samples.parquet`."""

_PLACE = ("model", "task", "length", "policy", "budget", "moment", "seed")
_LISTED = ("budget", "moment", "length", "seed", "model")
"""Fields in which the cells of two runs often differ."""
_COMPUTED = ("model_revision", "task_version", "dtype", "device", "attention")


@dataclass(frozen=True)
class Place:
    """What a cell measures, apart from the task's data."""

    model: str
    task: str
    length: int
    policy: str
    budget: str
    moment: str
    seed: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Place:
        """The place of a row of `cells.parquet`."""
        return cls(
            model=str(row["model"]),
            task=str(row["task"]),
            length=int(row["length"]),
            policy=str(row["policy"]),
            budget=str(row["budget"]),
            moment=str(row["moment"]),
            seed=int(row["seed"]),
        )


@dataclass(frozen=True)
class Scores:
    """The scored responses of a cell by key.

    Attributes:
        scores: The score.
        responses: The text.
        contexts: The context.
    """

    scores: dict[Key, float]
    responses: dict[Key, str]
    contexts: dict[Key, str]


@dataclass(frozen=True)
class Pair:
    """A cell of the baseline and the cell of the run with the same `match`.

    Attributes:
        place: What it measures.
        metric: The metric's name.
        higher_is_better: Whether larger scores are better.
        problem: Why it cannot be compared, or an empty string. The scores are then empty.
        settled: Whether the problem is none of the run's: the baseline has no score either.
        baseline: Scores of the baseline.
        run: Scores of the run.
    """

    place: Place
    metric: str
    higher_is_better: bool
    problem: str = ""
    settled: bool = False
    baseline: Scores = Scores({}, {}, {})
    run: Scores = Scores({}, {}, {})

    @functools.cached_property
    def shared(self) -> list[Key]:
        """The keys that both have, in the baseline's order."""
        return [key for key in self.baseline.scores if key in self.run.scores]

    @functools.cached_property
    def gaps(self) -> tuple[stats.Floats, stats.Floats]:
        """Sum and number of each context's differences, run minus baseline: `[C]`, `[C]`."""
        gaps = np.array([self.run.scores[key] - self.baseline.scores[key] for key in self.shared])
        return stats.by_cluster(gaps, [self.baseline.contexts[key] for key in self.shared])

    @property
    def differs(self) -> bool:
        """Whether the scores of any context differ."""
        return bool(np.any(self.gaps[0]))


def pair_cells(baseline: Frames, run: Frames) -> list[Pair]:
    """Pair every cell of a baseline with the cell of a run that measures the same.

    Cells the run has and the baseline lacks are not looked at.

    Args:
        baseline: What is asked for.
        run: What is there.

    Returns:
        A pair for each cell of the baseline, in its order. A cell that the run lacks, or that has
        no score, has a `problem`.

    Raises:
        UserError: One of them has two cells that measure the same.
    """
    before, after = _by_match(baseline[0], "baseline"), _by_match(run[0], "run")
    samples = _by_cell(baseline[1]), _by_cell(run[1])
    pairs = []
    for match, row in before.items():
        other = after.get(match)
        place, facts = Place.of(row), (str(row["metric"]), bool(row["higher_is_better"]))
        problem = _problem(row, other, after.values())
        if other is None or problem:
            pairs.append(Pair(place, *facts, problem, settled=row["status"] != "ok"))
            continue
        scores = [
            _scores(s.get(str(r["cell"]))) for s, r in zip(samples, (row, other), strict=True)
        ]
        pair = Pair(place, *facts, "", False, *scores)
        if not pair.shared:
            pair = Pair(place, *facts, "the two runs have no sample in common")
        pairs.append(pair)
    return pairs


def pair_with_full(run: Frames) -> list[Pair]:
    """Pair every cell of a run with the full cache's cell of the same task; the full is "baseline".

    Args:
        run: The run.

    Returns:
        A pair for each cell that has a score and a full cache to compare with.
    """
    cells = [row for row in records(run[0]) if row["status"] == "ok"]
    samples = _by_cell(run[1])
    full = {_beside(row): _scores(samples[row["cell"]]) for row in cells if row["policy"] == "full"}
    return [
        Pair(
            Place.of(row),
            str(row["metric"]),
            bool(row["higher_is_better"]),
            baseline=full[_beside(row)],
            run=_scores(samples[row["cell"]]),
        )
        for row in cells
        if row["policy"] != "full" and _beside(row) in full
    ]


def _beside(row: Mapping[str, Any]) -> tuple[object, ...]:
    """What a cell has in common with its full cache; a live dialogue has one of its own."""
    return (*(row[name] for name in ("model", "task", "length", "seed")), row["moment"] == "turns")


def made_differently(baseline: pd.DataFrame, run: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """What the cells that both runs have were made with, where it differs.

    Args:
        baseline: Cells of the baseline.
        run: Cells of the run.

    Returns:
        By name, such as "torch" or "device", what the baseline and the run have, with commas if
        their cells have several.
    """
    before, after = _by_match(baseline, "baseline"), _by_match(run, "run")
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for match in before:
        if match not in after:
            continue
        one, two = _made_with(before[match]), _made_with(after[match])
        for name in sorted(one.keys() | two.keys()):
            if one.get(name) != two.get(name):
                values = found.setdefault(name, ({}, {}))
                values[0][one.get(name, "none")] = values[1][two.get(name, "none")] = None
    return {name: (", ".join(one), ", ".join(two)) for name, (one, two) in found.items()}


def _made_with(row: Mapping[str, Any]) -> dict[str, str]:
    made = {name: str(row[name]) for name in _COMPUTED}
    for name, value in recorded(str(row["versions"])).items():
        made[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return made


def _by_match(cells: pd.DataFrame, whose: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    places: set[Place] = set()
    for row in records(cells):
        if Place.of(row) in places:
            raise UserError(
                f"the {whose} measures {row['task']}, {row['policy']} at {row['budget']} twice; "
                "compare two runs of one grid each"
            )
        places.add(Place.of(row))
        found[str(row["match"])] = row
    return found


def _by_cell(samples: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {str(cell): part for cell, part in samples.groupby("cell", sort=False)}


def _scores(samples: pd.DataFrame | None) -> Scores:
    found = Scores({}, {}, {})
    for key, row in _keyed(samples):
        if math.isfinite(row["score"]):
            found.scores[key] = float(row["score"])
            found.responses[key] = str(row["response"])
            found.contexts[key] = str(row["context_id"])
    return found


def _keyed(samples: pd.DataFrame | None) -> Iterator[tuple[Key, dict[str, Any]]]:
    columns = ["sample_id", "question_id", "repeat", "score", "response", "context_id"]
    for row in [] if samples is None else records(samples[columns]):
        yield (str(row["sample_id"]), int(row["question_id"]), int(row["repeat"])), row


# --- why a cell cannot be compared ----------------------------------------------------------------


def _problem(
    row: Mapping[str, Any], other: Mapping[str, Any] | None, run: Iterable[Mapping[str, Any]]
) -> str:
    if row["status"] != "ok":
        return f"the baseline has no score: {row['error']}"
    if other is None:
        return _why_missing(row, list(run))
    if other["status"] != "ok":
        return f"the run has no score: {other['error']}"
    if other["metric"] != row["metric"]:
        return f"scored by {row['metric']} in the baseline and by {other['metric']} in the run"
    return ""


def _why_missing(row: Mapping[str, Any], run: list[Mapping[str, Any]]) -> str:
    """Why no cell of the run has the row's `match`, from the cells that are nearest to it."""
    same = [other for other in run if Place.of(other) == Place.of(row)]
    for other in same:
        if other["data_hash"] != row["data_hash"]:
            return f"the task's data differ: {row['data_hash']} and {other['data_hash']}"
        if other["metric"] != row["metric"]:
            return f"scored by {row['metric']} in the baseline and by {other['metric']} in the run"
        made = answers(str(row["versions"])), answers(str(other["versions"]))
        return f"answers are made differently: {made[0]} in the baseline, {made[1]} in the run"
    for name in _LISTED:
        others = [n for n in _PLACE if n != name]
        near = [o for o in run if all(o[n] == row[n] for n in others)]
        if near:
            values = ", ".join(dict.fromkeys(str(o[name]) for o in near))
            return f"not in the run, which has {name} {values} instead"
    return "not in the run"
