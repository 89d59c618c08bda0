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
    informed_policies,
    lower_is_better_tasks,
    pick,
    policy_title,
    readers,
    records,
    tasks_at_chance,
    unit_scale,
)
from kvbench.report.front import HELD, READ, MemoryMetric, front
from kvbench.report.overall import CONFIG
from kvbench.runs.schema import FIDELITY
from kvbench.tables.numbers import NumberFormat, score_kind
from kvbench.tables.table import Column, Compared, Interval, Name, Phrase, TableCell

DOWN = " ↓"
"""Marks a task for which a lower score is better."""
MARK = "°"
"""Marks a task on which the full cache is not above chance."""
MOST_TASKS = 8
"""Maximum number of tasks in one table."""

Filled: TypeAlias = tuple[Column, Sequence[TableCell]]
"""A column with its cells, one per element of `Panel.configs`."""
Config: TypeAlias = tuple[str, ...]
"""Policy, budget and moment."""


@dataclass(frozen=True)
class Panel:
    """The results of one table, with a row per policy and budget.

    Attributes:
        model: Model name, unique within the results.
        group: Name of the benchmark.
        variant: Length, moment and seed.
        cells: The cells of the panel.
        overall: Means over tasks; empty if there are none.
    """

    model: str
    group: str
    variant: ResultVariant
    cells: pd.DataFrame
    overall: pd.DataFrame

    @cached_property
    def configs(self) -> list[Config]:
        """Policy, budget and moment of each row: full first, then in order of appearance."""
        return sorted(_by_config(self.cells), key=lambda config: config[0] != "full")

    @cached_property
    def tasks(self) -> list[str]:
        """Tasks in order of appearance."""
        return list(dict.fromkeys(self.cells["task"].astype(str)))

    @property
    def title(self) -> tuple[Phrase, ...]:
        """Group and, if they vary, length, moment and seed."""
        return (Name(self.group), f", {self.variant.label}" if self.variant.label else "")

    def of_task(self, task_name: str) -> pd.DataFrame:
        """Return the cells of one task."""
        return self.cells[self.cells["task"] == task_name]

    def marks(self, task_name: str) -> str:
        """Return the marks of a task's column."""
        return DOWN * (task_name in lower_is_better_tasks(self.cells)) + MARK * (
            task_name in tasks_at_chance(self.cells)
        )

    def task_title(self, task_name: str) -> Phrase:
        """Return the name of a task with its marks."""
        return (Name(task_name), self.marks(task_name))

    def metric_title(self, task_name: str) -> tuple[Phrase, ...]:
        """Return the name of a task with its metric."""
        metric_names = dict.fromkeys(self.of_task(task_name)["metric"].astype(str))
        return (Name(task_name), ", metric ", Name(", ".join(metric_names)))

    # --- columns ----------------------------------------------------------------------------------

    def names(self) -> list[Filled]:
        """Return the columns for policy and budget."""
        informed = informed_policies(self.cells)
        policies: list[TableCell] = [policy_title(policy, informed=policy in informed) for policy, *_ in self.configs]
        budgets: list[TableCell] = [Name(budget) for _, budget, _ in self.configs]
        return [(Column("policy"), policies), (Column("budget", align="right"), budgets)]

    def held(self) -> Filled:
        """Return the column of bytes held, as a share of the full cache."""
        return Column("KV held", NumberFormat.PERCENT), self._shares("share")

    def read(self) -> list[Filled]:
        """Return the column of bytes read per decode step; none if every policy reads all entries."""
        if not readers(self.cells):
            return []
        return [(Column("KV read", NumberFormat.PERCENT), self._shares("read_share"))]

    def allocated(self) -> list[Filled]:
        """Return the column of bytes allocated; none if no policy is quantised or pruned.

        Blocks and space for the answer add more to quantised caches than to plain ones.
        """
        if not holds_codes(self.cells):
            return []
        return [(Column("KV allocated", NumberFormat.PERCENT), self._shares("allocated_share"))]

    def _shares(self, share_column: str) -> list[TableCell]:
        """Return shares of the full cache's bytes: of the mean over tasks, else of the tasks with scores."""
        mean_rows = _by_config(self.overall)
        task_shares = self.cells[self.cells["status"] == "ok"].groupby(CONFIG)[share_column].mean().to_dict()
        return [
            mean_rows[config][share_column]
            if config in mean_rows and mean_rows[config]["status"] == "ok"
            else task_shares.get(config)
            for config in self.configs
        ]

    def held_bytes(self) -> Filled:
        """Return the column of bytes held, mean over tasks."""
        bytes_column = Column("bytes held", NumberFormat.BYTES)
        return self.column(bytes_column, self.overall, lambda mean_row: mean_row["kv_bytes_live"], None)

    def column(
        self,
        head_column: Column,
        frame: pd.DataFrame,
        cell_of: Callable[[Mapping[str, Any]], TableCell],
        failed: TableCell = "failed",
    ) -> Filled:
        """Fill a column from the rows of a frame.

        Args:
            head_column: The column.
            frame: Cells of one task, or means over tasks, of this panel.
            cell_of: Returns the table cell for a row with a score.
            failed: Table cell for a row without a score.
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
        failed: TableCell = "failed",
    ) -> Filled:
        """Return the column of a frame's scores, with or without intervals."""
        return self.column(
            _score_column(frame, column_title),
            frame,
            lambda score_row: _interval(score_row, "score") if bounds else score_row["score"],
            failed,
        )

    def gaps(self, frame: pd.DataFrame, *, failed: TableCell = None) -> Filled:
        """Return the column of paired differences from full."""
        gap_column = _score_column(frame, "difference to full", signed=True)
        return self.column(
            gap_column,
            frame,
            lambda score_row: None if score_row["policy"] == "full" else _interval(score_row, "diff"),
            failed,
        )

    def distances(self, frame: pd.DataFrame) -> list[Filled]:
        """Return the column of the KL divergence from the full cache; none if it was not measured or is the score."""
        if not len(frame) or frame["metric"].isin(FIDELITY).any() or not frame["kl"].notna().any():
            return []
        distance_column = Column("KL, nats", NumberFormat.NUMBER)
        return [self.column(distance_column, frame, lambda row: None if row["policy"] == "full" else row["kl"], None)]

    def compared(self, frame: pd.DataFrame, column_title: Phrase) -> Filled:
        """Return one column of scores with their paired differences from full."""

        def cell_of(score_row: Mapping[str, Any]) -> TableCell:
            is_full = score_row["policy"] == "full"
            return score_row["score"] if is_full else Compared(score_row["score"], _interval(score_row, "diff"))

        return self.column(_score_column(frame, column_title), frame, cell_of, None)

    def optimal(self) -> list[Filled]:
        """Return columns with stars for Pareto-optimal means over bytes held and, if they differ, bytes read."""
        if not readers(self.cells):
            return [self._optimal(HELD, "Pareto-optimal")]
        return [self._optimal(memory, f"Pareto-optimal ({memory.verb})") for memory in (HELD, READ)]

    def _optimal(self, memory: MemoryMetric, column_title: str) -> Filled:
        group_means = self.overall
        compressed_means = group_means[(group_means["policy"] != "full") & ~group_means["informed"]]
        direction_sign = 1.0 if group_means["higher_is_better"].iloc[0] else -1.0
        optimal_indices = set(
            compressed_means.index[front(compressed_means[memory.bytes], direction_sign * compressed_means["score"])]
        )
        marked_means = group_means.assign(best=[index in optimal_indices for index in group_means.index])
        star_column = Column(column_title, align="right")
        return self.column(star_column, marked_means, lambda mean_row: "★" if mean_row["best"] else "", "")


def panels(results: Results) -> Iterator[Panel]:
    """Yield every panel of a report that has cells."""
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
    """Return a column for the scores of a frame, or for their differences."""
    higher_is_better = not len(frame) or bool(frame["higher_is_better"].iloc[0])
    number_kind = score_kind(unit_scaled=not len(frame) or unit_scale(frame))
    return Column(column_title, number_kind, better="higher" if higher_is_better else "lower", signed=signed)


def _interval(score_row: Mapping[str, Any], column_name: str) -> Interval:
    return Interval(score_row[column_name], score_row[f"{column_name}_lo"], score_row[f"{column_name}_hi"])
