"""Lookup of the scores of runs for table cells."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from kvbench.errors import UserError
from kvbench.regression import significance
from kvbench.report.filters import filter_cells
from kvbench.report.frames import (
    informed_policies,
    metric_title,
    policy_title,
    recorded,
    records,
    unaveraged_tasks,
    unit_scale,
)
from kvbench.report.sorted_samples import Samples
from kvbench.runs.load import load_frames
from kvbench.runs.schema import FIDELITY
from kvbench.tables.table import Phrase
from kvbench.tables.text import counted, tokens

Row: TypeAlias = dict[str, Any]
"""A row of `cells.parquet`."""

_PLACE = ["model", "task", "length", "policy", "budget", "moment", "seed"]
_ANSWER = ["sample_id", "question_id", "repeat", "score", "context_id", "extra"]
_KEPT = 512
"""Number of configurations whose responses are cached; that of the reference is needed repeatedly."""
_MADE_WITH = ["data_hash", "task_version", "model_revision", "dtype", "device", "attention"]


@dataclass(frozen=True)
class Config:
    """Configuration of a cell, apart from the task.

    Attributes:
        model: The model, as the run names it.
        policy: Canonical spelling of the policy.
        budget: Canonical spelling of the budget.
        moment: When the cache was compressed.
        length: Tokens of prompt and answer; ignored for tasks whose data kvbench does not resize.
        seed: The run's seed.
    """

    model: str
    policy: str
    budget: str
    moment: str
    length: int
    seed: int

    @property
    def full(self) -> Config:
        """The corresponding configuration of the full cache."""
        return replace(self, policy="full", budget="full")

    @property
    def label(self) -> str:
        """Policy and budget as text."""
        return self.policy if self.policy == "full" else f"{self.policy} at {self.budget}"


@dataclass(frozen=True)
class ScoreSource:
    """Source of a score: a task, or only its samples with a field value.

    Attributes:
        task: The task.
        field: Field of `extra` that selects samples; "" for all.
        value: Value of the field.
        metric: Metric of the score; "" for the task's own.
        is_rating: Whether the score is a judge's rating from 1 to 10, divided by 10.
    """

    task: str
    field: str = ""
    value: str = ""
    metric: str = ""
    is_rating: bool = False

    @property
    def label(self) -> str:
        """Task, metric and field value as text."""
        parts = [self.metric.replace("_", " "), f"{self.field} {self.value}".strip()]
        return f"{self.task} ({', '.join(filter(None, parts))})" if any(parts) else self.task


Weights: TypeAlias = tuple[tuple[ScoreSource, float], ...]
"""A mean of scores: its sources, with weights that sum to 1."""

Key: TypeAlias = tuple[ScoreSource, str, int, int]
"""Source, sample, question and repeat."""


@dataclass(frozen=True)
class Responses:
    """The scored responses of a configuration from one source, by key."""

    scores: Mapping[Key, float]
    contexts: Mapping[Key, str]


@dataclass(frozen=True)
class Tested:
    """Result of a paired test.

    Attributes:
        gap: The mean paired difference.
        p: The p-value; NaN if no score differs.
        contexts: Number of common contexts.
    """

    gap: float
    p: float
    contexts: int


@dataclass(frozen=True)
class Paired:
    """Weighted scores of two configurations by key; the sum of each is a mean.

    Attributes:
        first: Scores of the first configuration.
        second: Scores of the second configuration, with the same keys.
        contexts: Context by key.
    """

    first: Mapping[Key, float]
    second: Mapping[Key, float]
    contexts: Mapping[Key, str]

    @property
    def gap(self) -> float:
        """The mean paired difference, first minus second; NaN without responses."""
        differences = [self.first[key] - self.second[key] for key in self.first]
        return math.fsum(differences) if differences else math.nan

    @property
    def means(self) -> tuple[float, float]:
        """The two means; NaN without responses."""
        if not self.first:
            return math.nan, math.nan
        return math.fsum(self.first.values()), math.fsum(self.second.values())

    def tested(self, draws: int) -> Tested:
        """Test the difference; see `significance.paired_p`."""
        p_value = math.nan
        if self.first != self.second:
            p_value = significance.paired_p(self.first, self.second, self.contexts, draws=draws)
        return Tested(self.gap, p_value, len(set(self.contexts.values())))


class Measures:
    """Cells of runs by configuration and task.

    Args:
        cells: The frame of `cells.parquet`, with at most one cell per model, task, length, policy, budget, moment and
            seed; see `merged`.
        samples: The frame of `samples.parquet`.
        by_metric: Returns the same cells with the scores of another metric, or None if no task has it.
    """

    def __init__(
        self,
        cells: pd.DataFrame,
        samples: pd.DataFrame,
        by_metric: Callable[[str], Measures | None] = lambda metric: None,
    ) -> None:
        self.cells = cells
        self._by_metric = functools.cache(by_metric)
        self._rows: dict[tuple[Any, ...], Row] = {}
        for cell_row in records(cells):
            self._rows[tuple(cell_row[column_name] for column_name in _PLACE)] = cell_row
        self._samples = Samples(samples)
        self._unaveraged = set(unaveraged_tasks(cells))
        self.informed = informed_policies(cells)
        of_fidelity = cells[cells["metric"].isin(FIDELITY)]
        self.fidelity: dict[str, str] = dict(zip(of_fidelity["task"], of_fidelity["metric"], strict=True))
        self._unit = {str(task_name): unit_scale(task_cells) for task_name, task_cells in cells.groupby("task")}
        self.responses = functools.lru_cache(maxsize=_KEPT)(self._responses)

    def row(self, config: Config, source: ScoreSource) -> Row | None:
        """Return the cell for a score, finished or failed; None if there is none."""
        if source.metric:
            other = self._by_metric(source.metric)
            return None if other is None else other.row(config, replace(source, metric=""))
        moment = config.moment
        if config.policy == "full":
            moment = "turns" if moment == "turns" else ""  # a live dialogue has a separate full cache
        for length in (config.length, 0):
            row_key = (source.task, length, config.policy, config.budget, moment, config.seed)
            if (cell_row := self._rows.get((config.model, *row_key))) is not None:
                return cell_row
        return None

    def score(self, config: Config, source: ScoreSource) -> float:
        """Return a mean score; NaN if there is none."""
        cell_row = self.row(config, source)
        if cell_row is None or cell_row["status"] != "ok":
            return math.nan
        if not source.field:
            return float(cell_row["score"])
        if not self.is_mean(source):
            return math.nan
        scores = self.responses(config, source).scores.values()
        return math.fsum(scores) / len(scores) if scores else math.nan

    def live_bytes(self, config: Config, source: ScoreSource) -> float:
        """Return the mean bytes held after compression; NaN if unknown."""
        return self._bytes(config, source, "kv_bytes_live")

    def full_bytes(self, config: Config, source: ScoreSource) -> float:
        """Return the mean bytes that the full cache would hold; NaN if unknown."""
        return self._bytes(config, source, "kv_bytes_full")

    def _bytes(self, config: Config, source: ScoreSource, column: str) -> float:
        cell_row = self.row(config, source)
        return float(cell_row[column]) if cell_row is not None and cell_row["status"] == "ok" else math.nan

    def higher_is_better(self, config: Config, source: ScoreSource) -> bool:
        """Return whether a higher score is better; True if there is no score."""
        cell_row = self.row(config, source)
        return cell_row is None or bool(cell_row["higher_is_better"])

    def unit(self, source: ScoreSource) -> bool:
        """Return whether all scores of a source's task lie in [0, 1]."""
        if source.metric and (other := self._by_metric(source.metric)) is not None:
            return other.unit(replace(source, metric=""))
        return self._unit.get(source.task, True)

    def is_fidelity(self, source: ScoreSource) -> bool:
        """Return whether a source's score compares a cell with the full cache."""
        return not source.metric and source.task in self.fidelity

    @property
    def metric_suffix(self) -> str:
        """Suffix of a table's title: the metric of fidelity, if all tasks have the same."""
        metric, *others = {self.fidelity.get(task, "") for task in self.cells["task"]}
        if others or not metric:
            return ""
        return f": {metric_title(metric)} ({'higher' if FIDELITY[metric] else 'lower'} is better)"

    def policy_labels(self, labels: Mapping[str, str]) -> Mapping[str, Phrase]:
        """Return the names to show for policies, with marks for those that see the answer."""
        return dict(labels) | {policy: policy_title(policy, informed=True, labels=labels) for policy in self.informed}

    def is_mean(self, source: ScoreSource) -> bool:
        """Return whether the score of a source's task is a mean over samples."""
        if source.metric and (other := self._by_metric(source.metric)) is not None:
            return other.is_mean(replace(source, metric=""))
        return source.task not in self._unaveraged

    def paired(self, first_config: Config, second_config: Config, weights: Weights) -> Paired:
        """Return the weighted scores of two configurations on their common responses.

        The weight of a source does not depend on its number of responses. Contexts of different tasks are distinct.
        Empty if a source has no common responses, or its score is not a mean over them.

        Args:
            first_config: The first configuration.
            second_config: The second configuration.
            weights: The mean to compare.
        """
        first_scores: dict[Key, float] = {}
        second_scores: dict[Key, float] = {}
        context_by_key: dict[Key, str] = {}
        for source, weight in weights:
            first_responses, second_responses = (
                self.responses(first_config, source),
                self.responses(second_config, source),
            )
            shared_keys = [
                response_key for response_key in first_responses.scores if response_key in second_responses.scores
            ]
            if not shared_keys or not self.is_mean(source):
                return Paired({}, {}, {})
            for response_key in shared_keys:
                first_scores[response_key] = weight / len(shared_keys) * first_responses.scores[response_key]
                second_scores[response_key] = weight / len(shared_keys) * second_responses.scores[response_key]
                context_by_key[response_key] = f"{source.task}\0{first_responses.contexts[response_key]}"
        return Paired(first_scores, second_scores, context_by_key)

    def _responses(self, config: Config, source: ScoreSource) -> Responses:
        if source.metric and (other := self._by_metric(source.metric)) is not None:
            found = other.responses(config, replace(source, metric=""))
            scores_by_key = {(source, *key[1:]): score for key, score in found.scores.items()}
            return Responses(scores_by_key, {(source, *key[1:]): text for key, text in found.contexts.items()})
        cell_row = self.row(config, source)
        scores: dict[Key, float] = {}
        contexts: dict[Key, str] = {}
        cell_samples = self._samples.of([] if cell_row is None else [cell_row["cell"]])
        answer_columns = [cell_samples[column_name].tolist() for column_name in _ANSWER]
        for sample_id, question_id, repeat, score, context, extra_json in zip(*answer_columns, strict=True):
            is_included = not source.field or str(_extra(extra_json).get(source.field)) == source.value
            if is_included and math.isfinite(score):
                response_key = (source, str(sample_id), int(question_id), int(repeat))
                scores[response_key] = float(score)
                contexts[response_key] = str(context)
        return Responses(scores, contexts)


@functools.lru_cache(maxsize=4096)
def _extra(extra_json: str) -> dict[str, Any]:
    return dict(json.loads(extra_json or "{}"))


def load(folders: Sequence[Path], filters: Mapping[str, Sequence[str]], metric: str | None = None) -> Measures:
    """Load runs for a table.

    Args:
        folders: Folders of runs.
        filters: Values to keep by column; see `filter_cells`.
        metric: Metric of the scores; None: every task's own.

    Raises:
        UserError: A run cannot be read, a value is in none of them, or two runs have different scores for the same
            cell.
    """

    def by_metric(other_metric: str) -> Measures | None:
        with warnings.catch_warnings():  # tasks without the metric are not asked for
            warnings.simplefilter("ignore")
            try:
                return load(folders, filters, other_metric)
            except UserError:
                return None

    cells, samples = load_frames(folders, ["cell", *_ANSWER], coded=True, metric=metric)
    cells = filter_cells(cells, filters)
    cells = merged(cells, folders)
    return Measures(cells, samples[samples["cell"].isin(cells["cell"])], by_metric)


def merged(cells: pd.DataFrame, folders: Sequence[Path] = ()) -> pd.DataFrame:
    """Remove duplicate cells.

    Cells with the same `match` and score are duplicates; the one with the most samples is kept. Finished cells take
    precedence over failed ones.

    Args:
        cells: The frame of `cells.parquet`, of one or several runs.
        folders: Folders of the runs, for the message.

    Raises:
        UserError: Two cells measure the same but differ.
    """
    is_repeated = cells.duplicated(_PLACE, keep=False)
    kept_indices = list(cells.index[~is_repeated])
    for _, place_cells in cells[is_repeated].groupby(_PLACE, sort=False, dropna=False):
        ok_cells = place_cells[place_cells["status"] == "ok"] if (place_cells["status"] == "ok").any() else place_cells
        is_same = ok_cells["match"].nunique() == 1 and ok_cells["score"].nunique(dropna=False) == 1
        if len(ok_cells) > 1 and not is_same:
            first_cell, second_cell, *_ = records(ok_cells.drop_duplicates(["match", "score"]))
            raise _conflict(first_cell, second_cell, folders)
        kept_indices.append(ok_cells.sort_values("samples", kind="stable").index[-1])
    return cells.loc[sorted(kept_indices)].reset_index(drop=True)


def _conflict(first: Row, second: Row, folders: Sequence[Path]) -> UserError:
    what = f"{first['task']}, {first['policy']}" + f" at {first['budget']}" * (first["policy"] != "full")
    where = [first["model"], tokens(int(first["length"])), first["moment"], f"seed {first['seed']}"]
    apart = [
        f"{field_name.replace('_', ' ')} ({first[field_name]} and {second[field_name]})"
        for field_name in _MADE_WITH
        if first[field_name] != second[field_name]
    ]
    first_made, second_made = recorded(str(first["versions"])), recorded(str(second["versions"]))
    apart += [
        f"{field} ({first_made.get(field)} and {second_made.get(field)})"
        for field in sorted(first_made | second_made)
        if first_made.get(field) != second_made.get(field)
    ]
    if first["samples"] != second["samples"]:
        apart.insert(0, f"{counted(int(first['samples']), 'sample')} and {second['samples']}")
    run_folders = [_home(cell_row, folders) for cell_row in (first, second)]
    have = (
        f"{run_folders[0]} has" if run_folders[0] == run_folders[1] else f"{run_folders[0]} and {run_folders[1]} have"
    )
    return UserError(
        f"{have} two scores of {what} ({', '.join(filter(None, where))}): {first['score']:.4g} and "
        f"{second['score']:.4g}; they differ in {', '.join(apart[:3]) or 'nothing recorded'}; use "
        "runs with the same settings, or only one of them"
    )


def _home(cell_row: Row, folders: Sequence[Path]) -> str:
    """Return the folder that contains a cell."""
    for folder in folders:
        if cell_row["cell"] in set(load_frames(folder, ["cell"])[0]["cell"]):
            return str(folder)
    return "the run"
