"""The scores of runs, looked up by what the cell of a table asks for."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.regression import significance
from kvbench.report.frames import recorded, records, unit_scale
from kvbench.report.samples import Samples
from kvbench.report.text import counted, listed, tokens
from kvbench.runs.load import load_frames

Row: TypeAlias = dict[str, Any]
"""A row of `cells.parquet`."""

_PLACE = ["model", "task", "length", "policy", "budget", "moment", "seed"]
_ANSWER = ["sample_id", "question_id", "repeat", "score", "context_id", "extra"]
_KEPT = 512
"""Configurations whose responses stay in memory: that of the reference is asked for again."""
_MADE_WITH = ["data_hash", "task_version", "model_revision", "dtype", "device", "attention"]


@dataclass(frozen=True)
class Config:
    """What is measured, apart from the task.

    Attributes:
        model: The model, as the run names it.
        policy: Canonical spelling of the policy.
        budget: Canonical spelling of the budget.
        moment: When the cache was compressed.
        length: Tokens of prompt and answer; tasks whose data kvbench does not resize have any.
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
        """The full cache in its place."""
        return replace(self, policy="full", budget="full")

    @property
    def label(self) -> str:
        """Policy and budget in a few words."""
        return self.policy if self.policy == "full" else f"{self.policy} at {self.budget}"


@dataclass(frozen=True)
class Source:
    """What a score is taken from: a task, or its samples in which a field has a value."""

    task: str
    field: str = ""
    value: str = ""

    @property
    def label(self) -> str:
        """The task, and the part of it."""
        return f"{self.task} ({self.field} {self.value})" if self.field else self.task


Weights: TypeAlias = tuple[tuple[Source, float], ...]
"""A mean of scores: its sources, with weights that add up to 1."""

Key: TypeAlias = tuple[Source, str, int, int]
"""Source, sample, question and repeat."""


@dataclass(frozen=True)
class Responses:
    """The scored responses of a configuration from one source, by key."""

    scores: Mapping[Key, float]
    contexts: Mapping[Key, str]


@dataclass(frozen=True)
class Tested:
    """A paired test.

    Attributes:
        gap: The mean paired difference.
        p: The p-value; NaN if no score differs.
        contexts: Contexts that both configurations have.
    """

    gap: float
    p: float
    contexts: int


@dataclass(frozen=True)
class Paired:
    """Weighted scores of two configurations by key: each adds up to a mean.

    Attributes:
        first: Scores of the first configuration.
        second: Scores of the second one, with the same keys.
        contexts: The context of each key.
    """

    first: Mapping[Key, float]
    second: Mapping[Key, float]
    contexts: Mapping[Key, str]

    @property
    def gap(self) -> float:
        """The mean paired difference, first minus second; NaN without responses."""
        gaps = [self.first[key] - self.second[key] for key in self.first]
        return math.fsum(gaps) if gaps else math.nan

    def tested(self, draws: int) -> Tested:
        """Test the difference; see `significance.paired_p`."""
        p = math.nan
        if self.first != self.second:
            p = significance.paired_p(self.first, self.second, self.contexts, n=draws)
        return Tested(self.gap, p, len(set(self.contexts.values())))


class Measures:
    """Cells of runs by what they measure.

    Args:
        cells: The frame of `cells.parquet`, with one cell at most for every model, task, length,
            policy, budget, moment and seed; see `merged`.
        samples: The frame of `samples.parquet`.
    """

    def __init__(self, cells: pd.DataFrame, samples: pd.DataFrame) -> None:
        self.cells = cells
        self._rows: dict[tuple[Any, ...], Row] = {}
        for row in records(cells):
            self._rows[tuple(row[name] for name in _PLACE)] = row
        self._samples = Samples(samples)
        self._unit = {str(task): unit_scale(part) for task, part in cells.groupby("task")}
        self.responses = functools.lru_cache(maxsize=_KEPT)(self._responses)

    def row(self, config: Config, source: Source) -> Row | None:
        """The cell that holds a score, finished or failed; None if there is none."""
        moment = config.moment
        if config.policy == "full":
            moment = "turns" if moment == "turns" else ""  # a live dialogue has its own full cache
        for length in (config.length, 0):
            place = (source.task, length, config.policy, config.budget, moment, config.seed)
            if (row := self._rows.get((config.model, *place))) is not None:
                return row
        return None

    def score(self, config: Config, source: Source) -> float:
        """A mean score; NaN if there is none."""
        row = self.row(config, source)
        if row is None or row["status"] != "ok":
            return math.nan
        if not source.field:
            return float(row["score"])
        scores = self.responses(config, source).scores.values()
        return math.fsum(scores) / len(scores) if scores else math.nan

    def held(self, config: Config, source: Source) -> float:
        """Live bytes over those of the full cache; NaN if they are not known."""
        row = self.row(config, source)
        ok = row is not None and row["status"] == "ok" and row["kv_bytes_full"] > 0
        return row["kv_bytes_live"] / row["kv_bytes_full"] if row is not None and ok else math.nan

    def higher_is_better(self, config: Config, source: Source) -> bool:
        """The direction of a score that is there."""
        row = self.row(config, source)
        return row is None or bool(row["higher_is_better"])

    def unit(self, source: Source) -> bool:
        """Whether all scores of a source's task lie in [0, 1]."""
        return self._unit.get(source.task, True)

    def paired(self, a: Config, b: Config, weights: Weights) -> Paired:
        """The scores of two configurations on the responses that both have.

        Every source has its weight in the mean however many responses it has. Contexts of different
        tasks are different contexts.

        Args:
            a: The first configuration.
            b: The second one.
            weights: The mean that is compared.

        Returns:
            The weighted scores; empty if a source has no response in both.
        """
        first: dict[Key, float] = {}
        second: dict[Key, float] = {}
        contexts: dict[Key, str] = {}
        for source, weight in weights:
            one, two = self.responses(a, source), self.responses(b, source)
            keys = [key for key in one.scores if key in two.scores]
            if not keys:
                return Paired({}, {}, {})
            for key in keys:
                first[key] = weight / len(keys) * one.scores[key]
                second[key] = weight / len(keys) * two.scores[key]
                contexts[key] = f"{source.task}\0{one.contexts[key]}"
        return Paired(first, second, contexts)

    def _responses(self, config: Config, source: Source) -> Responses:
        row = self.row(config, source)
        scores: dict[Key, float] = {}
        contexts: dict[Key, str] = {}
        part = self._samples.of([] if row is None else [row["cell"]])
        answers = [part[name].tolist() for name in _ANSWER]
        for sample, question, repeat, score, context, extra in zip(*answers, strict=True):
            inside = not source.field or str(_extra(extra).get(source.field)) == source.value
            if inside and math.isfinite(score):
                key = (source, str(sample), int(question), int(repeat))
                scores[key] = float(score)
                contexts[key] = str(context)
        return Responses(scores, contexts)


@functools.lru_cache(maxsize=4096)
def _extra(text: str) -> dict[str, Any]:
    return dict(json.loads(text or "{}"))


def load(folders: Sequence[Path], chosen: Mapping[str, Sequence[str]]) -> Measures:
    """Read runs for a table.

    Args:
        folders: Folders of runs.
        chosen: By column of `cells.parquet`, the values to keep, as text. The full cache is kept
            whatever its policy, budget and moment, and so are tasks of natural length.

    Raises:
        UserError: A run cannot be read, a value is in none of them, or two runs have measured the
            same with different scores.
    """
    cells, samples = load_frames(folders, ["cell", *_ANSWER], coded=True)
    for column, named in chosen.items():
        known = cells[column].astype(str)
        sets = catalogue.task_sets() if column == "task" and named else {}
        values: set[str] = set()
        for name in named:
            more = {name, *sets.get(name, ())} & {*known}
            values |= more
            if not more:
                some = listed(list(dict.fromkeys(filter(None, known))))
                raise UserError(f"--{column} {name}: not in the run; it has {some}")
        stays = (cells["policy"] == "full") & (column in ("policy", "budget", "moment"))
        stays |= (cells["length"] == 0) & (column == "length")
        if values:
            cells = cells[known.isin(values) | stays]
    cells = merged(cells, folders)
    return Measures(cells, samples[samples["cell"].isin(cells["cell"])])


def merged(cells: pd.DataFrame, folders: Sequence[Path] = ()) -> pd.DataFrame:
    """Leave one cell for everything that was measured.

    Cells of the same `match` with the same score are one measurement; the one with most samples
    stays. A cell that failed gives way to one that did not.

    Args:
        cells: The frame of `cells.parquet`, of one or several runs.
        folders: Where they are from, for the message.

    Raises:
        UserError: Two cells measure the same and differ.
    """
    repeated = cells.duplicated(_PLACE, keep=False)
    kept = list(cells.index[~repeated])
    for _, part in cells[repeated].groupby(_PLACE, sort=False, dropna=False):
        done = part[part["status"] == "ok"] if (part["status"] == "ok").any() else part
        same = done["match"].nunique() == 1 and done["score"].nunique(dropna=False) == 1
        if len(done) > 1 and not same:
            one, two, *_ = records(done.drop_duplicates(["match", "score"]))
            raise _conflict(one, two, folders)
        kept.append(done.sort_values("samples", kind="stable").index[-1])
    return cells.loc[sorted(kept)].reset_index(drop=True)


def _conflict(one: Row, two: Row, folders: Sequence[Path]) -> UserError:
    what = f"{one['task']}, {one['policy']}" + f" at {one['budget']}" * (one["policy"] != "full")
    where = [one["model"], tokens(int(one["length"])), one["moment"], f"seed {one['seed']}"]
    apart = [
        f"{name.replace('_', ' ')} ({one[name]} and {two[name]})"
        for name in _MADE_WITH
        if one[name] != two[name]
    ]
    a, b = recorded(str(one["versions"])), recorded(str(two["versions"]))
    apart += [f"{k} ({a.get(k)} and {b.get(k)})" for k in sorted(a | b) if a.get(k) != b.get(k)]
    if one["samples"] != two["samples"]:
        apart.insert(0, f"{counted(int(one['samples']), 'sample')} and {two['samples']}")
    homes = [_home(row, folders) for row in (one, two)]
    have = f"{homes[0]} has" if homes[0] == homes[1] else f"{homes[0]} and {homes[1]} have"
    return UserError(
        f"{have} two scores of {what} ({', '.join(filter(None, where))}): {one['score']:.4g} and "
        f"{two['score']:.4g}; they differ in {', '.join(apart[:3]) or 'nothing recorded'}; give "
        "runs that were made alike, or one of them"
    )


def _home(row: Row, folders: Sequence[Path]) -> str:
    """The folder that holds a cell."""
    for folder in folders:
        if row["cell"] in set(load_frames(folder, ["cell"])[0]["cell"]):
            return str(folder)
    return "the run"
