"""Layouts: tables whose cells specify which results to fill in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvbench.papers.layouts.measures import Config, Weights
from kvbench.papers.layouts.value import Value
from kvbench.tables.table import Column, Phrase, TableCell


@dataclass(frozen=True)
class MeasuredSlot:
    """A table cell that a run measures.

    Attributes:
        config: The configuration.
        weights: Task weights of the mean in this cell (usually one task).
        value: Value derived from the mean.
    """

    config: Config
    weights: Weights
    value: Value = Value.SCORE

    @property
    def rivals(self) -> tuple[object, ...]:
        """Key shared by competing cells: everything but the policy."""
        config = self.config
        return (
            config.model,
            config.budget,
            config.moment,
            config.length,
            config.seed,
            self.weights,
            self.value,
        )


@dataclass(frozen=True)
class ComputedSlot:
    """A table cell computed from others, such as a loss from two averages.

    Attributes:
        config: The configuration.
        name: Name of its row or column.
        of: The operands.
        compute: Maps the values of the operands (scores in points) to the value of the cell, in percent.
        better: Which numbers are better.
        signed: Whether the value is a change, written with a sign.
    """

    config: Config
    name: str
    of: tuple[MeasuredSlot | ComputedSlot, ...]
    compute: Callable[[Sequence[float]], float]
    better: str
    signed: bool

    @property
    def rivals(self) -> tuple[object, ...]:
        """Key shared by competing cells: everything but the policy."""
        config = self.config
        return config.model, config.budget, config.moment, config.length, config.seed, self.name


Slot: TypeAlias = MeasuredSlot | ComputedSlot

PUBLISHED_ROW = "published"
"""Label of a row of published results."""


@dataclass(frozen=True)
class LayoutRow:
    """A row of a layout.

    Attributes:
        lead: One cell per leading column of the layout.
        slots: One slot per heading of the layout; None for an empty cell.
        group: Group of adjacent rows; a line separates groups.
        published: Published results for the slots, shown below the row; empty for none.
    """

    lead: tuple[TableCell, ...]
    slots: tuple[Slot | None, ...]
    group: str = ""
    published: tuple[TableCell, ...] = ()


@dataclass(frozen=True)
class Layout:
    """A table to be filled with results.

    Attributes:
        title: Title.
        lead: Columns of row labels.
        heads: Title and group of the other columns.
        rows: Rows.
        notes: Notes that do not depend on the results.
        labels: Names to show for policies.
        digits: Number of decimals of the slots, where it is not that of the number's format.
    """

    title: tuple[Phrase, ...]
    lead: tuple[Column, ...]
    heads: tuple[tuple[Phrase, str], ...]
    rows: tuple[LayoutRow, ...]
    notes: tuple[Phrase, ...] = ()
    labels: Mapping[str, Phrase] = field(default_factory=dict)
    digits: Mapping[Slot, int] = field(default_factory=dict)

    @property
    def slots(self) -> list[Slot]:
        """All slots, row by row."""
        return [slot for layout_row in self.rows for slot in layout_row.slots if slot is not None]
