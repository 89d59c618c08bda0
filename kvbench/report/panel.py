"""A panel of a report (one model, group, length, moment and seed) and the columns of its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import pandas as pd

from kvbench.report.frames import (
    Results,
    Variant,
    falling,
    holds_codes,
    pick,
    readers,
    records,
    silent_tasks,
    unit_scale,
)
from kvbench.report.front import HELD, READ, Memory, front
from kvbench.report.numbers import Kind, score_kind
from kvbench.report.overall import CONFIG
from kvbench.report.table import Cell, Column, Compared, Interval, Name, Phrase

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
    variant: Variant
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

    def of_task(self, task: str) -> pd.DataFrame:
        """The cells of one task."""
        return self.cells[self.cells["task"] == task]

    def marks(self, task: str) -> str:
        """What a task's column is marked with."""
        return DOWN * (task in falling(self.cells)) + MARK * (task in silent_tasks(self.cells))

    def task_title(self, task: str) -> Phrase:
        """A task's name with its marks."""
        return (Name(task), self.marks(task))

    def metric_title(self, task: str) -> tuple[Phrase, ...]:
        """A task's name with the metric that scores it."""
        metrics = dict.fromkeys(self.of_task(task)["metric"].astype(str))
        return (Name(task), ", metric ", Name(", ".join(metrics)))

    # --- columns ----------------------------------------------------------------------------------

    def names(self) -> list[Filled]:
        """Policy and budget."""
        heads = (Column("policy"), Column("budget", align="right"))
        return [
            (head, [Name(config[i]) for config in self.configs]) for i, head in enumerate(heads)
        ]

    def held(self) -> Filled:
        """Bytes held as a share of the full cache: of the mean, else over the tasks with scores."""
        return Column("KV held", Kind.PERCENT), self._shares("share")

    def read(self) -> list[Filled]:
        """Bytes that a decode step reads, as `held`; no column if all that is held is read."""
        if not readers(self.cells):
            return []
        return [(Column("KV read", Kind.PERCENT), self._shares("read_share"))]

    def allocated(self) -> list[Filled]:
        """Bytes allocated, as `held`; no column if no policy holds codes.

        Blocks and the room for an answer add to codes a share that whole entries do not have.
        """
        if not holds_codes(self.cells):
            return []
        return [(Column("KV allocated", Kind.PERCENT), self._shares("allocated_share"))]

    def _shares(self, name: str) -> list[Cell]:
        """A share of the full cache's bytes: of the mean, else over the tasks with scores."""
        means = _by_config(self.overall)
        shares = self.cells[self.cells["status"] == "ok"].groupby(CONFIG)[name].mean().to_dict()
        return [
            means[c][name] if c in means and means[c]["status"] == "ok" else shares.get(c)
            for c in self.configs
        ]

    def held_bytes(self) -> Filled:
        """Bytes held, mean over tasks."""
        head = Column("bytes held", Kind.BYTES)
        return self.column(head, self.overall, lambda row: row["kv_bytes_live"], None)

    def column(
        self,
        head: Column,
        frame: pd.DataFrame,
        cell_of: Callable[[Mapping[str, Any]], Cell],
        failed: Cell = "failed",
    ) -> Filled:
        """Fill a column from the rows of a frame.

        Args:
            head: The column.
            frame: Cells of one task, or means over tasks, of this panel.
            cell_of: Gives the cell of a row that has a score.
            failed: The cell of a row without a score.
        """
        rows = _by_config(frame)
        cells = [
            (cell_of(rows[c]) if rows[c]["status"] == "ok" else failed) if c in rows else None
            for c in self.configs
        ]
        return head, cells

    def scores(
        self, frame: pd.DataFrame, title: Phrase, *, bounds: bool = False, failed: Cell = "failed"
    ) -> Filled:
        """Scores of a frame as in `column`, with or without their intervals."""
        return self.column(
            _score_column(frame, title),
            frame,
            lambda row: _interval(row, "score") if bounds else row["score"],
            failed,
        )

    def gaps(self, frame: pd.DataFrame, *, failed: Cell = None) -> Filled:
        """Paired differences to full, as in `column`."""
        head = _score_column(frame, "difference to full", signed=True)
        return self.column(
            head,
            frame,
            lambda row: None if row["policy"] == "full" else _interval(row, "diff"),
            failed,
        )

    def compared(self, frame: pd.DataFrame, title: Phrase) -> Filled:
        """Scores with their paired differences to full in one column, as in `column`."""

        def cell_of(row: Mapping[str, Any]) -> Cell:
            full = row["policy"] == "full"
            return row["score"] if full else Compared(row["score"], _interval(row, "diff"))

        return self.column(_score_column(frame, title), frame, cell_of, None)

    def optimal(self) -> list[Filled]:
        """Stars for the settings whose means are Pareto-optimal, over bytes held and bytes read.

        If all that is held is read, there is one column.
        """
        if not readers(self.cells):
            return [self._optimal(HELD, "Pareto-optimal")]
        return [self._optimal(memory, f"Pareto-optimal ({memory.verb})") for memory in (HELD, READ)]

    def _optimal(self, memory: Memory, title: str) -> Filled:
        means = self.overall
        points = means[means["policy"] != "full"]
        sign = 1.0 if means["higher_is_better"].iloc[0] else -1.0
        best = set(points.index[front(points[memory.bytes], sign * points["score"])])
        marked = means.assign(best=[index in best for index in means.index])
        head = Column(title, align="right")
        return self.column(head, marked, lambda row: "★" if row["best"] else "", "")


def panels(results: Results) -> Iterator[Panel]:
    """Every panel of a report that has cells."""
    for model in results.models:
        for group in results.groups(model):
            for variant in results.variants(model, group):
                cells, overall = (
                    _of_panel(frame, model, group, variant)
                    for frame in (results.cells, results.overall)
                )
                if len(cells):
                    yield Panel(model, group, variant, cells, overall)


def _of_panel(frame: pd.DataFrame, model: str, group: str, variant: Variant) -> pd.DataFrame:
    if not len(frame):
        return frame
    return pick(frame[(frame["model"] == model) & (frame["group"] == group)], variant)


def _by_config(frame: pd.DataFrame) -> dict[Config, dict[str, Any]]:
    return {tuple(str(row[name]) for name in CONFIG): row for row in records(frame)}


def _score_column(frame: pd.DataFrame, title: Phrase, *, signed: bool = False) -> Column:
    """A column for the scores of a frame, or for their differences."""
    higher = not len(frame) or bool(frame["higher_is_better"].iloc[0])
    kind = score_kind(unit=not len(frame) or unit_scale(frame))
    return Column(title, kind, better="higher" if higher else "lower", signed=signed)


def _interval(row: Mapping[str, Any], name: str) -> Interval:
    return Interval(row[name], row[f"{name}_lo"], row[f"{name}_hi"])
