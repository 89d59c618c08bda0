"""Any table of a run: which of its dimensions are rows, which are columns."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from kvbench.errors import UserError, unknown
from kvbench.layouts.measures import Config, Measures, Source, Weights
from kvbench.layouts.slots import Layout, LayoutRow, Measured
from kvbench.layouts.value import Value
from kvbench.report.frames import budget_order, falling, records
from kvbench.report.panel import DOWN
from kvbench.report.table import Column, Name, Phrase
from kvbench.report.text import tokens

DIMENSIONS = ("policy", "budget", "task", "group", "model", "moment", "length", "seed")
"""What can be on an axis."""

_TASKS = ("task", "group")
_FULL = {"policy": "full", "budget": "full", "moment": ""}
"""What the full cache has in these dimensions."""

_TITLES = {
    Value.SCORE: "Scores",
    Value.DIFF: "Paired differences to the full cache",
    Value.RELATIVE: "Changes from the full cache, in percent of its score",
    Value.LOSS: "Losses against the full cache, in percent of its score",
    Value.KV: "Bytes held, in percent of the full cache",
}

Place: TypeAlias = dict[str, Any]
"""Values of some dimensions."""


@dataclass(frozen=True)
class Axes:
    """What a table shows.

    Attributes:
        rows: Dimensions that name the rows, the outermost first.
        columns: Dimensions that name the columns.
        value: What the cells show.
        mean: Whether to add the mean over tasks as a column, with its loss against the full cache.

    Raises:
        UserError: A dimension is unknown or given twice, or `mean` has nothing to add to.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    value: Value = Value.SCORE
    mean: bool = False

    def __post_init__(self) -> None:
        if not self.rows or not self.columns:
            raise UserError("--rows and --columns need at least one dimension each, such as policy")
        for name in (*self.rows, *self.columns):
            if name not in DIMENSIONS:
                raise unknown("dimension", name, DIMENSIONS)
            if (*self.rows, *self.columns).count(name) > 1:
                raise UserError(f"{name} is given twice; use it either in --rows or in --columns")
        if self.mean and self.columns != ("task",):
            raise UserError("--mean needs --columns task")
        if self.mean and self.value is not Value.SCORE:
            raise UserError("--mean needs --value score")


def default_rows(measures: Measures, columns: Sequence[str]) -> tuple[str, ...]:
    """Policy and budget, within whatever else the runs have several values of.

    Args:
        measures: The runs.
        columns: What is in the columns already.
    """
    cells = measures.cells[measures.cells["policy"] != "full"]
    varied = ("model", "length", "moment", "seed")
    sections = [n for n in varied if len(cells) and len(_values(cells, n)) > 1]
    return tuple(n for n in (*sections, "policy", "budget") if n not in columns)


def pivot(measures: Measures, axes: Axes) -> Layout:
    """The layout of a table with these axes.

    Tasks that are on no axis are averaged, each with the same weight. Every other dimension that is
    on no axis has to have one value only.

    Args:
        measures: The runs.
        axes: The axes.

    Raises:
        UserError: A dimension that is on no axis has several values.
    """
    cells = measures.cells
    used = (*axes.rows, *axes.columns)
    cut = cells[cells["policy"] != "full"]
    cut = cut if len(cut) else cells
    fixed = {name: _only(cut, name) for name in DIMENSIONS if name not in (*used, *_TASKS)}
    rows, columns = _places(cells, axes.rows), _places(cells, axes.columns)
    all_tasks = _tasks(cells, {})
    heads = [_head(place, measures) for place in columns]
    if axes.mean:
        heads += [(f"mean of {len(all_tasks)}", ""), ("loss", "")]
    pairs = cells[[*_TASKS]].drop_duplicates()  # in the order of the cells

    @functools.cache
    def weights_of(tasks: tuple[tuple[str, Any], ...]) -> Weights:
        return _tasks(pairs, dict(tasks))

    def of_tasks(place: Place) -> Weights:
        return weights_of(tuple((name, place[name]) for name in _TASKS if name in place))

    lines = []
    for row in rows:
        slots: list[Measured | None] = []
        for column in columns:
            place = {**row, **column}
            weights = of_tasks(place)
            one = Measured(_config(fixed, place), weights, axes.value) if weights else None
            slots.append(one)
        if axes.mean:
            config = _config(fixed, row)
            slots += [Measured(config, all_tasks), Measured(config, all_tasks, Value.LOSS)]
        if any(slots):
            lead = tuple(_shown(name, row[name]) for name in axes.rows)
            lines.append(LayoutRow(lead, tuple(slots), _group(row, axes.rows)))
    lead_columns = tuple(Column(name, merged=name != axes.rows[-1]) for name in axes.rows)
    several = "" if {"task", "group"} & {*used} or len(all_tasks) == 1 else _mean(all_tasks)
    title = (_TITLES[axes.value], several, *_of(fixed), ".")
    return Layout(title, lead_columns, tuple(heads), tuple(lines))


def _only(cells: pd.DataFrame, name: str) -> Any:
    """The one value of a dimension that is on no axis."""
    values = _values(cells, name)
    if len(values) > 1:
        some = ", ".join(map(str, values))
        raise UserError(
            f"the run has several values of {name}: {some}; put {name} in --rows or --columns, or "
            f"choose one with --{name}"
        )
    return values[0]


def _values(cells: pd.DataFrame, name: str) -> list[Any]:
    """The values of a dimension in the order of a table."""
    values = list(dict.fromkeys(cells[name]))
    if name == "length":
        # Tasks of natural length have 0 beside any other length.
        return sorted(filter(None, values)) or values
    if name == "budget":
        return sorted(values, key=lambda b: (b != "full", *budget_order(str(b))))
    return sorted(values) if name == "seed" else values


def _places(cells: pd.DataFrame, names: Sequence[str]) -> list[Place]:
    """The places along an axis that the run has, full first."""
    full, cut = cells[cells["policy"] == "full"], cells[cells["policy"] != "full"]
    found = _combined(cut, names)
    if "policy" in names or not found:
        found = [{**p, **_own(p)} for p in _combined(full, names)] + found
    found = [dict(key) for key in dict.fromkeys(tuple(place.items()) for place in found)]
    order = {name: _values(cells, name) for name in names}
    # The full cache has the first row of each section that is outside its own dimensions.
    for name in ("policy", "budget", "moment"):
        if name in order:
            order[name].sort(key=lambda value: value != _FULL[name])
    return sorted(found, key=lambda p: [order[name].index(p[name]) for name in names])


def _combined(cells: pd.DataFrame, names: Sequence[str]) -> list[Place]:
    if "length" in names and (cells["length"] > 0).any():
        cells = cells[cells["length"] > 0]
    return [{k: row[k] for k in names} for row in records(cells[list(names)].drop_duplicates())]


def _own(place: Place) -> Place:
    return {name: value for name, value in _FULL.items() if name in place and name != "moment"}


def _config(fixed: Mapping[str, Any], place: Place) -> Config:
    known = {**fixed, **place}
    budget = "full" if known["policy"] == "full" else str(known["budget"])
    return Config(
        model=str(known["model"]),
        policy=str(known["policy"]),
        budget=budget,
        moment=str(known["moment"]),
        length=int(known["length"]),
        seed=int(known["seed"]),
    )


def _tasks(cells: pd.DataFrame, place: Place) -> Weights:
    """The tasks of a place, all with the same weight."""
    mine = cells
    for name in _TASKS:
        if name in place:
            mine = mine[mine[name] == place[name]]
    tasks = list(dict.fromkeys(mine["task"].astype(str)))
    return tuple((Source(task), 1 / len(tasks)) for task in tasks)


def _head(place: Place, measures: Measures) -> tuple[Phrase, str]:
    """Title and group of a column."""
    *outer, last = place.items()
    group = ", ".join(_plain(name, value) for name, value in outer)
    down = DOWN * (last[0] == "task" and str(last[1]) in falling(measures.cells))
    return (_shown(*last), down), group


def _shown(name: str, value: Any) -> Phrase:
    return tokens(int(value)) if name == "length" else Name(str(value))


def _plain(name: str, value: Any) -> str:
    return tokens(int(value)) if name == "length" else str(value)


def _group(place: Place, names: Sequence[str]) -> str:
    """Which rows stand together: those of a section, or all but the full cache."""
    if len(names) == 1:
        return str(place.get("policy") == "full")
    return str(place[names[0]])


def _mean(weights: Weights) -> str:
    return f", mean of {len(weights)} tasks"


def _of(fixed: Mapping[str, Any]) -> Iterable[Phrase]:
    """What all cells of a table share."""
    if "model" in fixed:
        yield from (", model ", Name(str(fixed["model"])))
    if fixed.get("policy", "full") != "full":
        yield from (", policy ", Name(str(fixed["policy"])))
    if fixed.get("budget", "full") != "full":
        yield from (", budget ", Name(str(fixed["budget"])))
