"""Matching cells of two runs, and their common scores."""

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
from kvbench.report.frames import answers, policy_title, recorded, records
from kvbench.report.sorted_samples import Samples
from kvbench.tables.table import Phrase

Key: TypeAlias = tuple[str, int, int]
"""Sample, question and repeat, by which responses are paired."""
Frames: TypeAlias = tuple[pd.DataFrame, pd.DataFrame]
"""The frames of `cells.parquet` and `samples.parquet`."""

COLUMNS = ("cell", "sample_id", "question_id", "repeat", "score", "response", "context_id")
"""Columns of `samples.parquet` that a comparison needs."""
_Scores: TypeAlias = dict[Key, tuple[float, str, str]]

_PLACE = ("model", "task", "length", "policy", "budget", "moment", "seed")
_LISTED = ("budget", "moment", "length", "seed", "model")
"""Fields that often differ between two runs."""
_COMPUTED = ("model_revision", "task_version", "dtype", "device", "attention")


@dataclass(frozen=True)
class CellLabel:
    """Identity of a cell, apart from the task's data, and whether its policy sees the answer."""

    model: str
    task: str
    length: int
    policy: str
    budget: str
    moment: str
    seed: int
    informed: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, cell_row: Mapping[str, Any]) -> CellLabel:
        """Return the label of a row of `cells.parquet`."""
        return cls(
            model=str(cell_row["model"]),
            task=str(cell_row["task"]),
            length=int(cell_row["length"]),
            policy=str(cell_row["policy"]),
            budget=str(cell_row["budget"]),
            moment=str(cell_row["moment"]),
            seed=int(cell_row["seed"]),
            informed=bool(cell_row["informed"]),
        )

    @property
    def policy_title(self) -> Phrase:
        """The policy, marked if it sees the answer."""
        return policy_title(self.policy, informed=self.informed)


@dataclass(frozen=True)
class SharedResponses:
    """The common scored responses of two cells, in the order of the first one.

    Attributes:
        before: `[n]` scores of the baseline.
        after: `[n]` scores of the run.
        contexts: `[n]`, index of each response's context among the sorted contexts.
        samples: Number of common samples.
        same: Whether all responses and all scores are the same.
        known: Number of scored responses of the baseline.
        level: Mean score of all responses of the baseline.
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
class CellPair:
    """A cell of the baseline and the cell of the run with the same `match`.

    Attributes:
        place: Label of the cell.
        metric: Name of the metric.
        higher_is_better: Whether larger scores are better.
        problem: Why the cell cannot be compared, or an empty string. `shared` is then empty.
        settled: Whether the problem is the baseline's, which has no score, and not the run's.
        shared: The common responses.
    """

    place: CellLabel
    metric: str
    higher_is_better: bool
    problem: str = ""
    settled: bool = False
    shared: SharedResponses = SharedResponses()

    @property
    def responses(self) -> int:
        """Number of common responses."""
        return len(self.shared.before)

    @functools.cached_property
    def gaps(self) -> tuple[stats.Floats, stats.Floats]:
        """Sum and number of differences per context, run minus baseline: `[C]`, `[C]`."""
        return stats.by_cluster(self.shared.after - self.shared.before, self.shared.contexts)

    @property
    def differs(self) -> bool:
        """Whether the scores of any context differ."""
        return bool(np.any(self.gaps[0]))


def pair_cells(baseline: Frames, run: Frames) -> list[CellPair]:
    """Pair every cell of a baseline with the matching cell of a run; ignore other cells of the run.

    Returns:
        A pair per cell of the baseline, in its order. A cell that the run lacks, or that has no score, has a `problem`.

    Raises:
        UserError: One of them has two cells that measure the same.
    """
    baseline_rows, run_rows = _by_match(baseline[0], "baseline"), _by_match(run[0], "run")
    sample_sets = Samples(baseline[1]), Samples(run[1])
    cell_pairs = []
    for match_id, baseline_row in baseline_rows.items():
        run_row = run_rows.get(match_id)
        place, metric_facts = (
            CellLabel.of(baseline_row),
            (str(baseline_row["metric"]), bool(baseline_row["higher_is_better"])),
        )
        problem = _problem(baseline_row, run_row, run_rows.values())
        if run_row is None or problem:
            cell_pairs.append(CellPair(place, *metric_facts, problem, settled=baseline_row["status"] != "ok"))
            continue
        cell_scores = [
            _scores(cell_samples, cell_row["cell"])
            for cell_samples, cell_row in zip(sample_sets, (baseline_row, run_row), strict=True)
        ]
        pair = CellPair(place, *metric_facts, shared=_shared(*cell_scores))
        if changed := _changed_sample(*cell_scores):
            problem = f"the task's data differ: sample {changed} has a different context"
            pair = CellPair(place, *metric_facts, problem)
        elif not pair.responses:
            pair = CellPair(place, *metric_facts, "the two runs have no common samples")
        cell_pairs.append(pair)
    return cell_pairs


def pair_with_full(run: Frames) -> list[CellPair]:
    """Pair every scored cell of a run with the full cache's cell of the same task, which is the baseline.

    Cells whose score is not a mean over samples are left out.
    """
    ok_rows = [cell_row for cell_row in records(run[0]) if cell_row["status"] == "ok" and cell_row["is_mean"]]
    run_samples = Samples(run[1])
    full_scores = {
        _beside(cell_row): _scores(run_samples, cell_row["cell"])
        for cell_row in ok_rows
        if cell_row["policy"] == "full"
    }
    return [
        CellPair(
            CellLabel.of(cell_row),
            str(cell_row["metric"]),
            bool(cell_row["higher_is_better"]),
            shared=_shared(full_scores[_beside(cell_row)], _scores(run_samples, cell_row["cell"])),
        )
        for cell_row in ok_rows
        if cell_row["policy"] != "full" and _beside(cell_row) in full_scores
    ]


def _beside(cell_row: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the key of a cell's full cache; live dialogues have a separate one."""
    return (
        *(cell_row[field_name] for field_name in ("model", "task", "length", "seed")),
        cell_row["moment"] == "turns",
    )


def made_differently(baseline: pd.DataFrame, run: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return the settings that differ between the common cells of two runs.

    Args:
        baseline: Cells of the baseline.
        run: Cells of the run.

    Returns:
        The values of baseline and run by name, such as "torch" or "device"; comma-separated if there are several.
    """
    baseline_rows, run_rows = _by_match(baseline, "baseline"), _by_match(run, "run")
    differing_values: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for match_id in baseline_rows:
        if match_id not in run_rows:
            continue
        baseline_settings, run_settings = (
            _made_with(baseline_rows[match_id]),
            _made_with(run_rows[match_id]),
        )
        for setting_name in sorted(baseline_settings.keys() | run_settings.keys()):
            if baseline_settings.get(setting_name) != run_settings.get(setting_name):
                value_lists = differing_values.setdefault(setting_name, ({}, {}))
                value_lists[0][baseline_settings.get(setting_name, "none")] = value_lists[1][
                    run_settings.get(setting_name, "none")
                ] = None
    return {
        setting_name: (", ".join(baseline_settings), ", ".join(run_settings))
        for setting_name, (baseline_settings, run_settings) in differing_values.items()
    }


def _made_with(cell_row: Mapping[str, Any]) -> dict[str, str]:
    settings = {setting_name: str(cell_row[setting_name]) for setting_name in _COMPUTED}
    for setting_name, setting_value in recorded(str(cell_row["versions"])).items():
        settings[setting_name] = (
            setting_value if isinstance(setting_value, str) else json.dumps(setting_value, sort_keys=True)
        )
    return settings


def _by_match(cells: pd.DataFrame, label: str) -> dict[str, dict[str, Any]]:
    row_by_match: dict[str, dict[str, Any]] = {}
    places: set[CellLabel] = set()
    for cell in records(cells):
        if CellLabel.of(cell) in places:
            raise UserError(
                f"the {label} measures {cell['task']}, {cell['policy']} at {cell['budget']} twice; "
                "compare two runs of one grid each"
            )
        places.add(CellLabel.of(cell))
        row_by_match[str(cell["match"])] = cell
    return row_by_match


def _scores(samples: Samples, cell_id: object) -> _Scores:
    """Return score, response and context of the scored responses of a cell, by key."""
    cell_samples = samples.of([cell_id])
    sample_columns = [cell_samples[column_name].tolist() for column_name in COLUMNS[1:]]
    return {
        (str(sample_id), int(question_id), int(repeat)): (float(score), str(response), str(context))
        for sample_id, question_id, repeat, score, response, context in zip(*sample_columns, strict=True)
        if math.isfinite(score)
    }


def _changed_sample(baseline_scores: _Scores, run_scores: _Scores) -> str:
    """Return a sample whose context differs between the cells, or an empty string."""
    changed_samples = (
        key[0] for key in baseline_scores if key in run_scores and baseline_scores[key][2] != run_scores[key][2]
    )
    return next(changed_samples, "")


def _shared(baseline_scores: _Scores, run_scores: _Scores) -> SharedResponses:
    shared_keys = [key for key in baseline_scores if key in run_scores]
    if not shared_keys:
        return SharedResponses()
    baseline_answers, run_answers = (
        [baseline_scores[key] for key in shared_keys],
        [run_scores[key] for key in shared_keys],
    )
    all_scores = [score for cell_scores in (baseline_scores, run_scores) for score, _, _ in cell_scores.values()]
    return SharedResponses(
        np.array([score for score, _, _ in baseline_answers]),
        np.array([score for score, _, _ in run_answers]),
        np.unique([context for _, _, context in baseline_answers], return_inverse=True)[1],
        samples=len({key[0] for key in shared_keys}),
        same=all(
            baseline_answer[:2] == run_answer[:2]
            for baseline_answer, run_answer in zip(baseline_answers, run_answers, strict=True)
        ),
        known=len(baseline_scores),
        level=float(np.mean([score for score, _, _ in baseline_scores.values()])),
        unit=min(all_scores) >= 0 and max(all_scores) <= 1,
    )


# --- why a cell cannot be compared ----------------------------------------------------------------


def _problem(
    base_row: Mapping[str, Any],
    run_row: Mapping[str, Any] | None,
    run_rows: Iterable[Mapping[str, Any]],
) -> str:
    if base_row["status"] != "ok":
        return f"the baseline has no score: {base_row['error']}"
    if run_row is None:
        return _why_missing(base_row, list(run_rows))
    if run_row["status"] != "ok":
        return f"the run has no score: {run_row['error']}"
    if run_row["metric"] != base_row["metric"]:
        return f"scored by {base_row['metric']} in the baseline and by {run_row['metric']} in the run"
    if not (base_row["is_mean"] and run_row["is_mean"]):
        return f"{base_row['metric']} is not a mean over samples, so it has no paired test; use --metric"
    return ""


def _why_missing(row: Mapping[str, Any], run_rows: list[Mapping[str, Any]]) -> str:
    """Explain why the run has no matching cell, based on the closest cells."""
    same_place = [other for other in run_rows if CellLabel.of(other) == CellLabel.of(row)]
    for other in same_place:
        if other["data_hash"] != row["data_hash"]:
            return f"the task's data differ: {row['data_hash']} and {other['data_hash']}"
        if other["metric"] != row["metric"]:
            return f"scored by {row['metric']} in the baseline and by {other['metric']} in the run"
        styles = answers(str(row["versions"])), answers(str(other["versions"]))
        return f"answers are generated differently: {styles[0]} in the baseline, {styles[1]} in the run"
    for field_name in _LISTED:
        other_fields = [other_field for other_field in _PLACE if other_field != field_name]
        near_rows = [
            near_row
            for near_row in run_rows
            if all(near_row[other_field] == row[other_field] for other_field in other_fields)
        ]
        if near_rows:
            value_list = ", ".join(dict.fromkeys(str(near_row[field_name]) for near_row in near_rows))
            return f"not in the run, which has {field_name} {value_list} instead"
    return "not in the run"
