"""A panel of a report (one model, group, length, moment and seed) and the columns of its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import pandas as pd

from kvbench.report.frames import (
    Results,
    ResultVariant,
    holds_codes,
    lower_is_better_tasks,
    pick,
    readers,
    records,
    tasks_at_chance,
    unit_scale,
)
from kvbench.report.front import HELD, READ, MemoryMetric, front
from kvbench.report.overall import CONFIG
from kvbench.tables.numbers import NumberFormat, score_kind
from kvbench.tables.table import Cell, Column, Compared, Interval, Name, Phrase

DOWN = " ↓"
"""Marks a task with a metric for which less is better."""
MARK = "°"
"""Marks a task on which the full cache is not above chance."""
MOST_TASKS = 8
"""Tasks side by side in one table."""

Filled: TypeAlias = tuple[Column, Sequence[Cell]]
"""A column with its cells, one for each of `Panel.configs`."""
Config: TypeAlias = tuple[str, ...]
"""Policy, budget and moment."""


@dataclass(frozen=True)
class Panel:
    """The results that fit into one table: a row per policy and budget.

    Attributes:
        model: Model as the results tell it apart.
        group: Name of the benchmark.
        variant: Length, moment and seed.
        cells: The cells of the panel.
        overall: Their means over tasks; empty where the tasks have none.
    """

    model: str
    group: str
    variant: ResultVariant
    cells: pd.DataFrame
    overall: pd.DataFrame

    @cached_property
    def configs(self) -> list[Config]:
        """Policy, budget and moment of each row: full first, then as they appear."""
        return sorted(_by_config(self.cells), key=lambda config: config[0] != "full")

    @cached_property
    def tasks(self) -> list[str]:
        """Tasks in order of appearance."""
        return list(dict.fromkeys(self.cells["task"].astype(str)))

    @property
    def title(self) -> tuple[Phrase, ...]:
        """Group and, where there are several, length, moment and seed."""
        return (Name(self.group), f", {self.variant.label}" if self.variant.label else "")

    def of_task(self, task_name: str) -> pd.DataFrame:
        """The cells of one task."""
        return self.cells[self.cells["task"] == task_name]

    def marks(self, task_name: str) -> str:
        """What a task's column is marked with."""
        return DOWN * (task_name in lower_is_better_tasks(self.cells)) + MARK * (
            task_name in tasks_at_chance(self.cells)
        )

    def task_title(self, task_name: str) -> Phrase:
        """A task's name with its marks."""
        return (Name(task_name), self.marks(task_name))

    def metric_title(self, task_name: str) -> tuple[Phrase, ...]:
        """A task's name with the metric that scores it."""
        metric_names = dict.fromkeys(self.of_task(task_name)["metric"].astype(str))
        return (Name(task_name), ", metric ", Name(", ".join(metric_names)))

    # --- columns ----------------------------------------------------------------------------------

    def names(self) -> list[Filled]:
        """Policy and budget."""
        head_columns = (Column("policy"), Column("budget", align="right"))
        return [
            (head_column, [Name(config[head_index]) for config in self.configs])
            for head_index, head_column in enumerate(head_columns)
        ]

    def held(self) -> Filled:
        """Bytes held as a share of the full cache: of the mean, else over the tasks with scores."""
        return Column("KV held", NumberFormat.PERCENT), self._shares("share")

    def read(self) -> list[Filled]:
        """Bytes that a decode step reads, as `held`; no column if all that is held is read."""
        if not readers(self.cells):
            return []
        return [(Column("KV read", NumberFormat.PERCENT), self._shares("read_share"))]

    def allocated(self) -> list[Filled]:
        """Bytes allocated, as `held`; no column if no policy holds codes.

        Blocks and the room for an answer add to codes a share that whole entries do not have.
        """
        if not holds_codes(self.cells):
            return []
        return [(Column("KV allocated", NumberFormat.PERCENT), self._shares("allocated_share"))]

    def _shares(self, share_column: str) -> list[Cell]:
        """A share of the full cache's bytes: of the mean, else over the tasks with scores."""
        mean_rows = _by_config(self.overall)
        task_shares = self.cells[self.cells["status"] == "ok"].groupby(CONFIG)[share_column].mean().to_dict()
        return [
            mean_rows[config][share_column]
            if config in mean_rows and mean_rows[config]["status"] == "ok"
            else task_shares.get(config)
            for config in self.configs
        ]

    def held_bytes(self) -> Filled:
        """Bytes held, mean over tasks."""
        bytes_column = Column("bytes held", NumberFormat.BYTES)
        return self.column(bytes_column, self.overall, lambda mean_row: mean_row["kv_bytes_live"], None)

    def column(
        self,
        head_column: Column,
        frame: pd.DataFrame,
        cell_of: Callable[[Mapping[str, Any]], Cell],
        failed: Cell = "failed",
    ) -> Filled:
        """Fill a column from the rows of a frame.

        Args:
            head_column: The column.
            frame: Cells of one task, or means over tasks, of this panel.
            cell_of: Gives the cell of a row that has a score.
            failed: The cell of a row without a score.
        """
        row_by_config = _by_config(frame)
        filled_cells = [
            (cell_of(row_by_config[config]) if row_by_config[config]["status"] == "ok" else failed)
            if config in row_by_config
            else None
            for config in self.configs
        ]
        return head_column, filled_cells

    def scores(
        self,
        frame: pd.DataFrame,
        column_title: Phrase,
        *,
        bounds: bool = False,
        failed: Cell = "failed",
    ) -> Filled:
        """Scores of a frame as in `column`, with or without their intervals."""
        return self.column(
            _score_column(frame, column_title),
            frame,
            lambda score_row: _interval(score_row, "score") if bounds else score_row["score"],
            failed,
        )

    def gaps(self, frame: pd.DataFrame, *, failed: Cell = None) -> Filled:
        """Paired differences to full, as in `column`."""
        gap_column = _score_column(frame, "difference to full", signed=True)
        return self.column(
            gap_column,
            frame,
            lambda score_row: None if score_row["policy"] == "full" else _interval(score_row, "diff"),
            failed,
        )

    def compared(self, frame: pd.DataFrame, column_title: Phrase) -> Filled:
        """Scores with their paired differences to full in one column, as in `column`."""

        def cell_of(score_row: Mapping[str, Any]) -> Cell:
            is_full = score_row["policy"] == "full"
            return score_row["score"] if is_full else Compared(score_row["score"], _interval(score_row, "diff"))

        return self.column(_score_column(frame, column_title), frame, cell_of, None)

    def optimal(self) -> list[Filled]:
        """Stars for the settings whose means are Pareto-optimal, over bytes held and bytes read.

        If all that is held is read, there is one column.
        """
        if not readers(self.cells):
            return [self._optimal(HELD, "Pareto-optimal")]
        return [self._optimal(memory, f"Pareto-optimal ({memory.verb})") for memory in (HELD, READ)]

    def _optimal(self, memory: MemoryMetric, column_title: str) -> Filled:
        group_means = self.overall
        compressed_means = group_means[group_means["policy"] != "full"]
        direction_sign = 1.0 if group_means["higher_is_better"].iloc[0] else -1.0
        optimal_indices = set(
            compressed_means.index[front(compressed_means[memory.bytes], direction_sign * compressed_means["score"])]
        )
        marked_means = group_means.assign(best=[index in optimal_indices for index in group_means.index])
        star_column = Column(column_title, align="right")
        return self.column(star_column, marked_means, lambda mean_row: "★" if mean_row["best"] else "", "")


def panels(results: Results) -> Iterator[Panel]:
    """Every panel of a report that has cells."""
    for model_name in results.models:
        for group_name in results.groups(model_name):
            for variant in results.variants(model_name, group_name):
                panel_cells, panel_means = (
                    _of_panel(frame, model_name, group_name, variant) for frame in (results.cells, results.overall)
                )
                if len(panel_cells):
                    yield Panel(model_name, group_name, variant, panel_cells, panel_means)


def _of_panel(frame: pd.DataFrame, model_name: str, group_name: str, variant: ResultVariant) -> pd.DataFrame:
    if not len(frame):
        return frame
    return pick(frame[(frame["model"] == model_name) & (frame["group"] == group_name)], variant)


def _by_config(frame: pd.DataFrame) -> dict[Config, dict[str, Any]]:
    return {tuple(str(record[field_name]) for field_name in CONFIG): record for record in records(frame)}


def _score_column(frame: pd.DataFrame, column_title: Phrase, *, signed: bool = False) -> Column:
    """A column for the scores of a frame, or for their differences."""
    higher_is_better = not len(frame) or bool(frame["higher_is_better"].iloc[0])
    number_kind = score_kind(unit_scaled=not len(frame) or unit_scale(frame))
    return Column(column_title, number_kind, better="higher" if higher_is_better else "lower", signed=signed)


def _interval(score_row: Mapping[str, Any], column_name: str) -> Interval:
    return Interval(score_row[column_name], score_row[f"{column_name}_lo"], score_row[f"{column_name}_hi"])
