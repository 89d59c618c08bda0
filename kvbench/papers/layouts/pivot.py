"""Pivot tables of runs, with any dimensions as rows and columns."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from kvbench.errors import UserError, unknown
from kvbench.harness import catalogue
from kvbench.papers.layouts.measures import Config, Measures, ScoreSource, Weights
from kvbench.papers.layouts.slots import Layout, LayoutRow, MeasuredSlot
from kvbench.papers.layouts.value import Value
from kvbench.report.frames import budget_order, lower_is_better_tasks, records, unaveraged_tasks
from kvbench.report.panel import DOWN
from kvbench.tables.outputs import plain_text
from kvbench.tables.table import Column, Name, Phrase
from kvbench.tables.text import listed, tokens

DIMENSIONS = ("policy", "budget", "task", "domain", "group", "model", "moment", "length", "seed")
"""Dimensions of the axes. A domain is the subset of its benchmark that a task is in, or else the benchmark."""

_TASKS = ("task", "domain", "group")
_FULL = {"policy": "full", "budget": "full", "moment": ""}
"""Values of the full cache in these dimensions."""

_TITLES = {
    Value.SCORE: "Scores",
    Value.DIFF: "Paired differences from the full cache",
    Value.RELATIVE: "Changes from the full cache, in percent of its score",
    Value.LOSS: "Losses relative to the full cache, in percent of its score",
    Value.KV: "Bytes held, in percent of the full cache",
}

Place: TypeAlias = dict[str, Any]
"""Values of some dimensions."""


@dataclass(frozen=True)
class Axes:
    """Axes and values of a table.

    Attributes:
        rows: Dimensions of the rows, the outermost first.
        columns: Dimensions of the columns.
        value: Value of the cells.
        mean: Whether to add columns for the mean over tasks and its loss relative to the full cache.

    Raises:
        UserError: A dimension is unknown or repeated, or `mean` is set without scores by task.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    value: Value = Value.SCORE
    mean: bool = False

    def __post_init__(self) -> None:
        if not self.rows or not self.columns:
            raise UserError("--rows and --columns need at least one dimension each, such as policy")
        for dimension in (*self.rows, *self.columns):
            if dimension not in DIMENSIONS:
                raise unknown("dimension", dimension, DIMENSIONS)
            if (*self.rows, *self.columns).count(dimension) > 1:
                raise UserError(f"{dimension} is given twice; use it either in --rows or in --columns")
        if self.mean and self.columns not in (("task",), ("domain",)):
            raise UserError("--mean needs --columns task or domain")
        if self.mean and self.value is not Value.SCORE:
            raise UserError("--mean needs --value score")


def default_rows(measures: Measures, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the default rows: policy and budget, preceded by any other dimension that varies.

    Args:
        measures: The runs.
        columns: Dimensions already used as columns.
    """
    compressed_cells = measures.cells[measures.cells["policy"] != "full"]
    varied_dimensions = ("model", "length", "moment", "seed")
    sections = [
        dimension
        for dimension in varied_dimensions
        if len(compressed_cells) and len(_values(compressed_cells, dimension)) > 1
    ]
    return tuple(dimension for dimension in (*sections, "policy", "budget") if dimension not in columns)


def pivot(measures: Measures, axes: Axes, labels: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of a table with these axes.

    If tasks are on no axis, they are averaged with equal weights. Any other dimension that is on no axis must have a
    single value.

    Args:
        measures: The runs.
        axes: Axes and values of the table.
        labels: Names to show for policies.

    Raises:
        UserError: A dimension that is on no axis has several values, or there is nothing to average.
    """
    if measures.fidelity and axes.value in (Value.RELATIVE, Value.LOSS):
        metrics = ", ".join(dict.fromkeys(measures.fidelity.values()))
        raise UserError(f"--value {axes.value}: {metrics} compares with the full cache already; use --value score")
    cells, shown_labels = measures.cells, measures.policy_labels(labels or {})
    axis_dimensions = (*axes.rows, *axes.columns)
    if "domain" in axis_dimensions:  # which imports all benchmarks
        cells = _with_domains(cells)
    compressed_cells = cells[cells["policy"] != "full"]
    compressed_cells = compressed_cells if len(compressed_cells) else cells
    fixed_values = {
        dimension: _only(compressed_cells, dimension)
        for dimension in DIMENSIONS
        if dimension not in (*axis_dimensions, *_TASKS)
    }
    row_places, column_places = _places(cells, axes.rows), _places(cells, axes.columns)
    all_tasks = _tasks(cells, {})
    column_heads = [_head(cell_place, measures, shown_labels) for cell_place in column_places]
    if axes.mean:
        if not all_tasks:
            raise UserError("--mean needs a task whose score is a mean over samples; choose a metric with --metric")
        has_loss = not any(measures.is_fidelity(source) for source, _ in all_tasks)
        column_heads += [(f"mean of {len(all_tasks)}", "")] + [("loss", "")] * has_loss
    # In the order of the cells.
    task_pairs = cells[
        ["is_mean", "discriminative", "policy", "status", *(dimension for dimension in _TASKS if dimension in cells)]
    ].drop_duplicates()

    @functools.cache
    def weights_of(task_items: tuple[tuple[str, Any], ...]) -> Weights:
        return _tasks(task_pairs, dict(task_items))

    def of_tasks(place: Place) -> Weights:
        return weights_of(tuple((dimension, place[dimension]) for dimension in _TASKS if dimension in place))

    layout_rows = []
    for row_place in row_places:
        row_slots: list[MeasuredSlot | None] = []
        for column_place in column_places:
            cell_place = {**row_place, **column_place}
            weights = of_tasks(cell_place)
            cell_slot = MeasuredSlot(_config(fixed_values, cell_place), weights, axes.value) if weights else None
            row_slots.append(cell_slot)
        if axes.mean:
            config = _config(fixed_values, row_place)
            row_slots.append(MeasuredSlot(config, all_tasks))
            row_slots += [MeasuredSlot(config, all_tasks, Value.LOSS)] * has_loss
        if any(row_slots):
            lead_cells = tuple(_shown(dimension, row_place[dimension], shown_labels) for dimension in axes.rows)
            layout_rows.append(LayoutRow(lead_cells, tuple(row_slots), _group(row_place, axes.rows)))
    lead_columns = tuple(Column(dimension, merged=dimension != axes.rows[-1]) for dimension in axes.rows)
    mean_text = "" if {*_TASKS} & {*axis_dimensions} or len(all_tasks) == 1 else _mean(all_tasks)
    metric_suffix = measures.metric_suffix * (axes.value is not Value.KV)
    table_title = (_TITLES[axes.value], metric_suffix, mean_text, *_shared_values(fixed_values, shown_labels), ".")
    has_means = cells["task"].nunique() > 1 and (axes.mean or "task" not in axis_dimensions)
    unaveraged = unaveraged_tasks(cells) if has_means else []
    layout_notes = [f"Means leave out {listed(unaveraged)}, whose score is not a mean over samples."] * bool(unaveraged)
    averaged = {source.task for source, _ in all_tasks}
    at_chance = [task for task in _at_chance(cells) if task not in averaged] if has_means else []
    layout_notes += [f"Means leave out {listed(at_chance)}: the full cache is not above chance there."] * bool(
        at_chance
    )
    return Layout(table_title, lead_columns, tuple(column_heads), tuple(layout_rows), tuple(layout_notes), shown_labels)


def _with_domains(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells with their domains; a task in several subsets is in the first."""
    domains: dict[str, str] = {}
    for benchmark in catalogue.benchmarks()[0].values():
        for subset_name, task_names in benchmark.subsets.items():
            domains = dict.fromkeys(task_names, subset_name) | domains
    task_column, groups = cells["task"].astype(str), cells["group"].astype(str)
    return cells.assign(
        domain=[domains.get(task_name, group) for task_name, group in zip(task_column, groups, strict=True)]
    )


def _only(cells: pd.DataFrame, axis: str) -> Any:
    """Return the single value of a dimension that is on no axis."""
    dimension_values = _values(cells, axis)
    if len(dimension_values) > 1:
        names = ", ".join(map(str, dimension_values))
        raise UserError(
            f"the run has several values of {axis}: {names}; put {axis} in --rows or --columns, or "
            f"choose one with --{axis}"
        )
    return dimension_values[0]


def _values(cells: pd.DataFrame, dimension: str) -> list[Any]:
    """Return the values of a dimension in the order of a table."""
    dimension_values = list(dict.fromkeys(cells[dimension]))
    if dimension == "length":
        # Tasks of natural length have length 0, which is not a separate value.
        return sorted(filter(None, dimension_values)) or dimension_values
    if dimension == "budget":
        return sorted(dimension_values, key=lambda budget: (budget != "full", *budget_order(str(budget))))
    return sorted(dimension_values) if dimension == "seed" else dimension_values


def _places(cells: pd.DataFrame, dimensions: Sequence[str]) -> list[Place]:
    """Return the combinations of values along an axis, full first."""
    full_cells, compressed_cells = (
        cells[cells["policy"] == "full"],
        cells[cells["policy"] != "full"],
    )
    places = _combined(compressed_cells, dimensions)
    if "policy" in dimensions or not places:
        places = [
            {**axis_place, **_full_values(axis_place)} for axis_place in _combined(full_cells, dimensions)
        ] + places
    places = [dict(place_key) for place_key in dict.fromkeys(tuple(place.items()) for place in places)]
    value_order = {dimension: _values(cells, dimension) for dimension in dimensions}
    # The full cache is the first row of each section of other dimensions.
    for dimension in ("policy", "budget", "moment"):
        if dimension in value_order:
            value_order[dimension].sort(key=lambda value: value != _FULL[dimension])
    return sorted(
        places,
        key=lambda axis_place: [value_order[dimension].index(axis_place[dimension]) for dimension in dimensions],
    )


def _combined(cells: pd.DataFrame, dimensions: Sequence[str]) -> list[Place]:
    if "length" in dimensions and (cells["length"] > 0).any():
        cells = cells[cells["length"] > 0]
    return [
        {dimension: record[dimension] for dimension in dimensions}
        for record in records(cells[list(dimensions)].drop_duplicates())
    ]


def _full_values(place: Place) -> Place:
    return {dimension: value for dimension, value in _FULL.items() if dimension in place and dimension != "moment"}


def _config(fixed_values: Mapping[str, Any], place: Place) -> Config:
    all_values = {**fixed_values, **place}
    budget = "full" if all_values["policy"] == "full" else str(all_values["budget"])
    return Config(
        model=str(all_values["model"]),
        policy=str(all_values["policy"]),
        budget=budget,
        moment=str(all_values["moment"]),
        length=int(all_values["length"]),
        seed=int(all_values["seed"]),
    )


def _tasks(cells: pd.DataFrame, place: Place) -> Weights:
    """Return the tasks for some dimension values, with equal weights.

    A mean leaves out tasks whose own score is not a mean over samples, and, unless there is no other, tasks on which no
    full cache is above chance.
    """
    place_cells = cells
    for dimension in _TASKS:
        if dimension in place:
            place_cells = place_cells[place_cells[dimension] == place[dimension]]
    task_names = list(dict.fromkeys(place_cells["task"].astype(str)))
    if len(task_names) > 1:
        unaveraged = unaveraged_tasks(place_cells)
        task_names = [task_name for task_name in task_names if task_name not in unaveraged]
        at_chance = _at_chance(place_cells)
        task_names = [task_name for task_name in task_names if task_name not in at_chance] or task_names
    return tuple((ScoreSource(task_name), 1 / len(task_names)) for task_name in task_names)


def _at_chance(cells: pd.DataFrame) -> list[str]:
    """Return tasks on which the full cache is above chance for no model, length and seed."""
    full_cells = cells[(cells["policy"] == "full") & (cells["status"] == "ok")]
    is_above = full_cells.groupby("task", sort=False)["discriminative"].any()
    return [str(task) for task in is_above.index[~is_above]]


def _head(place: Place, measures: Measures, labels: Mapping[str, Phrase]) -> tuple[Phrase, str]:
    """Return title and group of a column."""
    *outer_items, last_item = place.items()
    group_text = ", ".join(plain_text(_shown(dimension, value, labels)) for dimension, value in outer_items)
    direction_mark = DOWN * (last_item[0] == "task" and str(last_item[1]) in lower_is_better_tasks(measures.cells))
    return (_shown(*last_item, labels), direction_mark), group_text


def _shown(dimension: str, value: Any, labels: Mapping[str, Phrase]) -> Phrase:
    if dimension == "policy" and value in labels:
        return labels[value]
    return tokens(int(value)) if dimension == "length" else Name(str(value))


def _group(place: Place, dimensions: Sequence[str]) -> str:
    """Return the group of a row: its section, or whether it is the full cache."""
    if len(dimensions) == 1:
        return str(place.get("policy") == "full")
    return str(place[dimensions[0]])


def _mean(weights: Weights) -> str:
    return f", mean of {len(weights)} tasks"


def _shared_values(fixed_values: Mapping[str, Any], labels: Mapping[str, Phrase]) -> Iterable[Phrase]:
    """Yield the common values of all cells of a table."""
    if "model" in fixed_values:
        yield from (", model ", Name(str(fixed_values["model"])))
    if fixed_values.get("policy", "full") != "full":
        yield from (", policy ", _shown("policy", fixed_values["policy"], labels))
    if fixed_values.get("budget", "full") != "full":
        yield from (", budget ", Name(str(fixed_values["budget"])))
