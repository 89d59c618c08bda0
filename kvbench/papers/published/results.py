"""Published results, transcribed in the data package `kvbench_published`."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any

import yaml

from kvbench.budget import Budget
from kvbench.errors import UserError, quoted, unknown

PACKAGE = "kvbench_published"
"""The data package, with `papers.yaml` and a `NAME.csv` for every paper."""

SCORES = ("score", "accuracy", "F1", "BLEU", "ROUGE-Lsum", "exact match", "pass@1")
"""Metrics of answers; 0 to 100 for kvbench's tasks."""


@dataclass(frozen=True)
class Figure:
    """One published result.

    Attributes:
        paper: The paper, a key of `papers`.
        table: Number of the table.
        part: Section of the table; may be empty.
        row: Row label.
        group: Heading above a group of columns; may be empty.
        column: Column heading.
        method: The method in the paper's words.
        policy: The method in kvbench's canonical spelling; empty if kvbench lacks it.
        dataset: The dataset in the paper's words.
        task: The dataset in kvbench: a task, a subset or a group; empty if kvbench lacks it.
        model: The model, in one spelling per paper; empty if not stated.
        budget: The budget as printed; empty for full and if not stated.
        fraction: The budget as a decimal fraction; empty if it is not one.
        tokens: The budget as a number of tokens, or of image tokens (`visual:64`); empty if it is not one.
        setting: When the cache was compressed, and other conditions of the measurement.
        metric: Metric of the value.
        value: The number exactly as printed.
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
        """The value as a number."""
        return float(self.value)

    @property
    def decimals(self) -> int:
        """The number of printed decimals."""
        return len(self.value.partition(".")[2])

    @property
    def half_digit(self) -> float:
        """Half a unit of the last printed digit: the maximum rounding error."""
        return 0.5 * 10.0**-self.decimals

    @property
    def kept(self) -> str:
        """The budget as in a run: `0.4`, `2048` or `full`; empty if unknown."""
        if self.policy == "full":
            return "full"
        budget_text = self.fraction or self.tokens
        return str(Budget.parse(budget_text)) if budget_text else ""

    @property
    def place(self) -> str:
        """Row and column of the result in its table."""
        row_text = ", ".join(filter(None, (self.part, self.row)))
        return f"{row_text}; {', '.join(filter(None, (self.group, self.column)))}"


FIELDS = tuple(field.name for field in fields(Figure))
"""The columns of the data files."""


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        number: Number of the table.
        title: Content of the table, in our words.
        where: Section of the paper.
        note: Explanation of the results; may be empty.
        figures: The results, row by row.
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
        """Return a table of the paper.

        Raises:
            UserError: The paper has no such table with results.
        """
        if number not in self.tables:
            table_numbers = ", ".join(self.tables)
            raise UserError(f"{self.name} has no table {quoted(number)} with figures; there are {table_numbers}")
        return self.tables[number]


@functools.cache
def papers() -> dict[str, Paper]:
    """Return all papers, by name.

    Raises:
        ValueError: A file has results for tables that `papers.yaml` does not list.
    """
    folder = resources.files(PACKAGE)
    paper_index: dict[str, Any] = yaml.safe_load((folder / "papers.yaml").read_text(encoding="utf-8"))
    return {paper_name: _paper(paper_name, paper_fields) for paper_name, paper_fields in paper_index.items()}


def paper(name: str) -> Paper:
    """Return a paper by name.

    Raises:
        UserError: There is no such paper; the message suggests the closest names.
    """
    if name not in papers():
        raise unknown("paper", name, papers())
    return papers()[name]


def published_spelling(policy_spelling: str) -> str:
    """Return a policy's spelling as `Figure.policy` has it: without `buffer`.

    Papers evict at every step of an answer or after some; the method is the same.
    """
    return re.sub(r":buffer=\d+", "", policy_spelling)


def all_figures() -> Iterator[Figure]:
    """Yield the results of all papers, table by table."""
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
