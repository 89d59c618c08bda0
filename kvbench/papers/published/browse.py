"""Filtering of published results, and their tables and overviews."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbench.errors import unknown
from kvbench.papers.published.results import Figure, Paper, PublishedTable, papers
from kvbench.tables.table import Column, Name, Table, TableCell, TableRow


@dataclass(frozen=True)
class Filter:
    """Filter of published results. An empty collection keeps all.

    Attributes:
        policies: Policies of kvbench, or methods in a paper's words.
        tasks: Tasks, subsets or groups of kvbench, or datasets in a paper's words.
        models: Substrings of model names.
        members: Tasks by group and subset, which the name of a group or subset includes.
    """

    policies: Collection[str] = ()
    tasks: Collection[str] = ()
    models: Collection[str] = ()
    members: Mapping[str, Collection[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.policies or self.tasks or self.models)

    def apply(self, figures: Sequence[Figure]) -> list[Figure]:
        """Return the results that pass the filter.

        Raises:
            UserError: A name matches no result; the message suggests the closest names.
        """
        task_members = {filter_name: {filter_name, *self.members.get(filter_name, ())} for filter_name in self.tasks}
        model_names = {figure.model for figure in figures if figure.model}
        matching_models = {
            filter_name: {model_name for model_name in model_names if filter_name.lower() in model_name.lower()}
            for filter_name in self.models
        }
        kept_figures = list(figures)
        for filter_kind, requested_names, figure_names in (
            ("policy", {filter_name: {filter_name} for filter_name in self.policies}, _methods),
            ("task", task_members, _datasets),
            ("model", matching_models, lambda figure: (figure.model,)),
        ):
            # kvbench's names are last, so that they are suggested if a paper's differ only in case.
            known_names = {
                filter_name.lower(): filter_name
                for figure in figures
                for filter_name in figure_names(figure)
                if filter_name
            }
            for filter_name, accepted_names in requested_names.items():
                if not known_names.keys() & _lower(accepted_names):
                    raise unknown(filter_kind, filter_name, known_names.values())
            allowed_names = _lower(
                filter_name for accepted_names in requested_names.values() for filter_name in accepted_names
            )
            kept_figures = [
                figure for figure in kept_figures if not requested_names or allowed_names & _lower(figure_names(figure))
            ]
        return kept_figures


def overview(figures: Iterable[Figure]) -> Table:
    """Return a table with a row per paper: its numbers of tables and results."""
    figures_by_paper: dict[str, list[Figure]] = {}
    for figure in figures:
        figures_by_paper.setdefault(figure.paper, []).append(figure)
    paper_rows = [
        TableRow(
            (
                Name(paper_name),
                str(len({figure.table for figure in paper_figures})),
                str(len(paper_figures)),
                _about(papers()[paper_name]),
            )
        )
        for paper_name, paper_figures in figures_by_paper.items()
    ]
    head_columns = (Column("name"), _right("tables"), _right("figures"), Column("paper"))
    return Table("", head_columns, tuple(paper_rows))


def contents(paper: Paper, figures: Iterable[Figure]) -> Table:
    """Return a table with a row per table of a paper: number, results, section and title."""
    figure_counts = Counter(figure.table for figure in figures)
    table_rows = [
        TableRow((table_number, str(figure_counts[table_number]), table.where, table.title))
        for table_number, table in paper.tables.items()
        if table_number in figure_counts
    ]
    head_columns = (_right("table"), _right("figures"), Column("section"), Column("what it shows"))
    return Table(_about(paper), head_columns, tuple(table_rows))


def as_printed(paper: Paper, table: PublishedTable, figures: Sequence[Figure]) -> Table:
    """Return a table with rows and columns as printed in the paper.

    Args:
        paper: The paper.
        table: The table.
        figures: Results to show, in the order of the table; rows and columns without any are left out.
    """
    column_keys = list(dict.fromkeys((figure.group, figure.column) for figure in figures))
    values_by_cell: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for figure in figures:
        row_values = values_by_cell.setdefault((figure.part, figure.row), {})
        row_values.setdefault((figure.group, figure.column), []).append(figure.value)
    has_parts = any(row_part for row_part, _ in values_by_cell)
    head_columns = [Column("")] * has_parts + [Column("")]
    head_columns += [Column(heading, group=group, align="right") for group, heading in column_keys]
    table_rows = []
    previous_part = None
    for (row_part, row_label), cell_values in values_by_cell.items():
        lead_cells: list[TableCell] = [row_part if row_part != previous_part else ""] if has_parts else []
        previous_part = row_part
        # A cell can hold two numbers, such as a score and a time.
        printed_cells = [
            " / ".join(cell_values[column_key]) if column_key in cell_values else None for column_key in column_keys
        ]
        table_rows.append(TableRow((*lead_cells, row_label, *printed_cells), group=row_part))
    heading = f"{paper.name}, Table {table.number} ({table.where}): {table.title}"
    return Table(heading, tuple(head_columns), tuple(table_rows), (table.note,) if table.note else ())


def _about(paper: Paper) -> str:
    return f"{paper.title} (arXiv {paper.arxiv})"


def _right(column_title: str) -> Column:
    return Column(column_title, align="right")


def _methods(figure: Figure) -> tuple[str, ...]:
    """Return the names of a method; for a policy with parameters, also its name alone."""
    return figure.method, figure.policy.partition(":")[0], figure.policy


def _datasets(figure: Figure) -> tuple[str, ...]:
    return figure.dataset, figure.task


def _lower(names: Iterable[str]) -> set[str]:
    return {name.lower() for name in names}
