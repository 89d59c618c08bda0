"""A layout: a table whose cells say what they ask for, before any run fills them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvbench.papers.layouts.measures import Config, Weights
from kvbench.papers.layouts.value import Value
from kvbench.tables.table import Cell, Column, Phrase


@dataclass(frozen=True)
class MeasuredSlot:
    """A cell that a run measures.

    Attributes:
        config: The configuration.
        weights: The mean over tasks that is shown; most often one task.
        value: What is shown of it.
    """

    config: Config
    weights: Weights
    value: Value = Value.SCORE

    @property
    def rivals(self) -> tuple[object, ...]:
        """What the cells that it competes with share: all but the policy."""
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
    """A cell that is computed from others, as a loss is from two averages.

    Attributes:
        config: The configuration.
        name: What it is called, the same in all cells of its row or column.
        of: What it is computed from.
        compute: From their numbers (scores in points) to its own, in percent.
        better: Which numbers are better.
        signed: Whether it is a change, which is written with a sign.
    """

    config: Config
    name: str
    of: tuple[MeasuredSlot | ComputedSlot, ...]
    compute: Callable[[Sequence[float]], float]
    better: str
    signed: bool

    @property
    def rivals(self) -> tuple[object, ...]:
        """What the cells that it competes with share: all but the policy."""
        config = self.config
        return config.model, config.budget, config.moment, config.length, config.seed, self.name


Slot: TypeAlias = MeasuredSlot | ComputedSlot


@dataclass(frozen=True)
class LayoutRow:
    """A row: what names it, and what its other cells ask for; None where nothing can be.

    Attributes:
        lead: A cell for each of the layout's leading columns.
        slots: A slot for each of its headings.
        group: Rows of one group stand together; a line divides them from others.
    """

    lead: tuple[Cell, ...]
    slots: tuple[Slot | None, ...]
    group: str = ""


@dataclass(frozen=True)
class Layout:
    """A table without figures.

    Attributes:
        title: What it shows.
        lead: The columns that name the rows.
        heads: Title and group of each other column.
        rows: The rows.
        notes: What a reader must know whatever the figures.
    """

    title: tuple[Phrase, ...]
    lead: tuple[Column, ...]
    heads: tuple[tuple[Phrase, str], ...]
    rows: tuple[LayoutRow, ...]
    notes: tuple[Phrase, ...] = ()

    @property
    def slots(self) -> list[Slot]:
        """All slots, row by row."""
        return [slot for layout_row in self.rows for slot in layout_row.slots if slot is not None]
