"""The transcribed figures of papers, read from the data package `kvbench_published`."""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

import yaml

from kvbench.budget import Budget
from kvbench.errors import UserError, quoted, unknown

PACKAGE = "kvbench_published"
"""The data package: `papers.yaml`, and `NAME.csv` for every paper in it."""

SCORES = ("score", "accuracy", "F1", "BLEU", "ROUGE-Lsum", "exact match", "pass@1")
"""The metrics that measure answers; on kvbench's tasks they run from 0 to 100."""


@dataclass(frozen=True)
class Figure:
    """One printed figure.

    Attributes:
        paper: Its paper, a key of `papers`.
        table: The table's number.
        part: Section of the table that its row is in; may be empty.
        row: The row's label.
        group: Heading above its column and neighbours; may be empty.
        column: The column's heading.
        method: What was measured, as the paper calls it.
        policy: The same in kvbench's canonical spelling; empty where kvbench has none.
        dataset: What it was measured on, as the paper calls it.
        task: The same in kvbench: a task, a subset or a group; empty where kvbench has none.
        model: The model, in one spelling per paper; empty where the paper does not say.
        budget: What was kept, as printed; empty for full and where the paper does not say.
        fraction: The budget as a fraction, in decimals; empty if it is not one.
        tokens: The budget as a number of tokens; empty if it is not one.
        setting: When the cache was compressed, and what else distinguishes the measurement.
        metric: What the number is.
        value: The number as printed, digits and all.
    """

    paper: str
    table: str
    part: str
    row: str
    group: str
    column: str
    method: str
    policy: str
    dataset: str
    task: str
    model: str
    budget: str
    fraction: str
    tokens: str
    setting: str
    metric: str
    value: str

    @property
    def number(self) -> float:
        """The value."""
        return float(self.value)

    @property
    def half_digit(self) -> float:
        """Half a unit of the last printed digit: how far rounding may have moved the value."""
        decimals = len(self.value.partition(".")[2])
        return 0.5 * 10.0**-decimals

    @property
    def kept(self) -> str:
        """The budget as a run records it: `0.4`, `2048` or `full`; empty if it is not known."""
        if self.policy == "full":
            return "full"
        budget_text = self.fraction or self.tokens
        return str(Budget.parse(budget_text)) if budget_text else ""

    @property
    def place(self) -> str:
        """Where the figure stands in its table."""
        row_text = ", ".join(filter(None, (self.part, self.row)))
        return f"{row_text}; {', '.join(filter(None, (self.group, self.column)))}"


FIELDS = tuple(field.name for field in fields(Figure))
"""The columns of the data files."""


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        number: Its number.
        title: What it shows, in our words.
        where: The section it belongs to.
        note: What a reader of its figures must know; may be empty.
        figures: Its figures, row by row.
    """

    number: str
    title: str
    where: str
    note: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Paper:
    """A paper with its tables, by number."""

    name: str
    title: str
    arxiv: str
    tables: dict[str, PublishedTable]

    def table(self, number: str) -> PublishedTable:
        """A table of the paper.

        Raises:
            UserError: The paper has no such table with figures.
        """
        if number not in self.tables:
            table_numbers = ", ".join(self.tables)
            raise UserError(f"{self.name} has no table {quoted(number)} with figures; there are {table_numbers}")
        return self.tables[number]


@functools.cache
def papers() -> dict[str, Paper]:
    """All papers, by name.

    Raises:
        ValueError: A file's figures are not those of the tables that `papers.yaml` lists.
    """
    folder = resources.files(PACKAGE)
    paper_index: dict[str, Any] = yaml.safe_load((folder / "papers.yaml").read_text(encoding="utf-8"))
    return {paper_name: _paper(paper_name, paper_fields) for paper_name, paper_fields in paper_index.items()}


def paper(name: str) -> Paper:
    """A paper by name.

    Raises:
        UserError: There is no such paper; the nearest names are given.
    """
    if name not in papers():
        raise unknown("paper", name, papers())
    return papers()[name]


def all_figures() -> Iterator[Figure]:
    """The figures of all papers, table by table."""
    for source_paper in papers().values():
        for table in source_paper.tables.values():
            yield from table.figures


def _paper(paper_name: str, paper_fields: dict[str, Any]) -> Paper:
    csv_text = (resources.files(PACKAGE) / f"{paper_name}.csv").read_text(encoding="utf-8")
    figures_by_table: dict[str, list[Figure]] = {str(table_number): [] for table_number in paper_fields["tables"]}
    for csv_row in csv.DictReader(csv_text.splitlines()):
        if csv_row["paper"] != paper_name or csv_row["table"] not in figures_by_table:
            raise ValueError(f"{paper_name}.csv: no table {csv_row['table']} of {csv_row['paper']} is listed")
        figures_by_table[csv_row["table"]].append(Figure(**csv_row))
    tables = {
        str(table_number): PublishedTable(
            str(table_number),
            table_fields["title"],
            table_fields["where"],
            table_fields.get("note", ""),
            tuple(figures_by_table[str(table_number)]),
        )
        for table_number, table_fields in paper_fields["tables"].items()
    }
    return Paper(paper_name, paper_fields["title"], paper_fields["arxiv"], tables)
