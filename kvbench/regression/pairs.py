"""Which cells of two runs measure the same, and the scores that both have."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench import stats
from kvbench.errors import UserError
from kvbench.report.frames import answers, recorded, records
from kvbench.report.samples import Samples

Key: TypeAlias = tuple[str, int, int]
"""Sample, question and repeat: what two cells are paired by."""
Frames: TypeAlias = tuple[pd.DataFrame, pd.DataFrame]
"""The frames of `cells.parquet` and `samples.parquet`."""

COLUMNS = ("cell", "sample_id", "question_id", "repeat", "score", "response", "context_id")
"""The columns of `samples.parquet` that a comparison reads."""
_Scores: TypeAlias = dict[Key, tuple[float, str, str]]

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
class Shared:
    """The scored responses that two cells share, in the order of the first one.

    Attributes:
        before: `[n]` scores of the baseline.
        after: `[n]` scores of the run.
        contexts: `[n]`, the place of each response's context among the sorted contexts.
        samples: How many samples they are.
        same: Whether all responses and all scores are the same.
        known: How many scored responses the baseline has.
        level: Mean score of all of these.
        unit: Whether all scores of both cells lie in [0, 1].
    """

    before: stats.Floats = field(default_factory=lambda: np.empty(0))
    after: stats.Floats = field(default_factory=lambda: np.empty(0))
    contexts: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    samples: int = 0
    same: bool = True
    known: int = 0
    level: float = math.nan
    unit: bool = True


@dataclass(frozen=True, eq=False)
class Pair:
    """A cell of the baseline and the cell of the run with the same `match`.

    Attributes:
        place: What it measures.
        metric: The metric's name.
        higher_is_better: Whether larger scores are better.
        problem: Why it cannot be compared, or an empty string. Nothing is then shared.
        settled: Whether the problem is none of the run's: the baseline has no score either.
        shared: The responses that both have.
    """

    place: Place
    metric: str
    higher_is_better: bool
    problem: str = ""
    settled: bool = False
    shared: Shared = Shared()

    @property
    def responses(self) -> int:
        """How many responses both have."""
        return len(self.shared.before)

    @functools.cached_property
    def gaps(self) -> tuple[stats.Floats, stats.Floats]:
        """Sum and number of each context's differences, run minus baseline: `[C]`, `[C]`."""
        return stats.by_cluster(self.shared.after - self.shared.before, self.shared.contexts)

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
    samples = Samples(baseline[1]), Samples(run[1])
    pairs = []
    for match, row in before.items():
        other = after.get(match)
        place, facts = Place.of(row), (str(row["metric"]), bool(row["higher_is_better"]))
        problem = _problem(row, other, after.values())
        if other is None or problem:
            pairs.append(Pair(place, *facts, problem, settled=row["status"] != "ok"))
            continue
        scores = [_scores(s, r["cell"]) for s, r in zip(samples, (row, other), strict=True)]
        pair = Pair(place, *facts, shared=_shared(*scores))
        if changed := _changed_sample(*scores):
            problem = f"the task's data differ: sample {changed} has another context"
            pair = Pair(place, *facts, problem)
        elif not pair.responses:
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
    samples = Samples(run[1])
    full = {_beside(row): _scores(samples, row["cell"]) for row in cells if row["policy"] == "full"}
    return [
        Pair(
            Place.of(row),
            str(row["metric"]),
            bool(row["higher_is_better"]),
            shared=_shared(full[_beside(row)], _scores(samples, row["cell"])),
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


def _scores(samples: Samples, cell: object) -> _Scores:
    """The scored responses of a cell: score, response and context by key."""
    part = samples.of([cell])
    columns = [part[name].tolist() for name in COLUMNS[1:]]
    return {
        (str(sample), int(question), int(repeat)): (float(score), str(response), str(context))
        for sample, question, repeat, score, response, context in zip(*columns, strict=True)
        if math.isfinite(score)
    }


def _changed_sample(baseline: _Scores, run: _Scores) -> str:
    """A sample whose context is not the same in both cells, or an empty string."""
    changed = (key[0] for key in baseline if key in run and baseline[key][2] != run[key][2])
    return next(changed, "")


def _shared(baseline: _Scores, run: _Scores) -> Shared:
    keys = [key for key in baseline if key in run]
    if not keys:
        return Shared()
    before, after = [baseline[key] for key in keys], [run[key] for key in keys]
    scores = [score for cell in (baseline, run) for score, _, _ in cell.values()]
    return Shared(
        np.array([score for score, _, _ in before]),
        np.array([score for score, _, _ in after]),
        np.unique([context for _, _, context in before], return_inverse=True)[1],
        samples=len({key[0] for key in keys}),
        same=all(one[:2] == two[:2] for one, two in zip(before, after, strict=True)),
        known=len(baseline),
        level=float(np.mean([score for score, _, _ in baseline.values()])),
        unit=min(scores) >= 0 and max(scores) <= 1,
    )


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
