"""Substitutes for a paper's policies, tasks, budgets and lengths: `--use NAME=OURS`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvbench.errors import UserError, unknown
from kvbench.harness import catalogue
from kvbench.papers.layouts.from_papers import LENGTHS, PublishedLayout
from kvbench.papers.layouts.measures import Measures
from kvbench.papers.published.results import Figure
from kvbench.tables.table import Name, Phrase


@dataclass(frozen=True)
class Substitutes:
    """Replacements in the layout of a paper.

    Attributes:
        replacements: The run's policy, task, budget or length, by the paper's method, dataset, budget or length.
    """

    replacements: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, layout: PublishedLayout, options: Iterable[str]) -> Substitutes:
        """Parse `NAME=OURS`, with NAME as printed in the table or by `kvbench published`.

        Raises:
            UserError: The table has no such name.
        """
        replacements = {}
        for option in options:
            figure_names = _names(layout.figures)
            # Names and replacements may contain "=".
            fitting_names = [figure_name for figure_name in figure_names if option.startswith(f"{figure_name}=")]
            if not fitting_names:
                raise unknown(f"name in {layout.name}", option.partition("=")[0], figure_names)
            longest_name = max(fitting_names, key=len)
            if not (replacement := option[len(longest_name) + 1 :]):
                raise UserError(f"--use {option}: name the replacement for {longest_name}")
            replacements[figure_names[longest_name]] = replacement
        return cls(replacements)

    def check(self, figures: Sequence[Figure], measures: Measures) -> None:
        """Validate that the runs have the replacements and that budgets remain distinct.

        Args:
            figures: Published results of the layout, before replacements.
            measures: The runs.

        Raises:
            UserError: A replacement is missing in the runs, or two budgets become equal.
        """
        cells = measures.cells
        for printed, ours in self.replacements.items():
            figure = next(
                figure
                for figure in figures
                if printed in (figure.method, figure.dataset, figure.budget, figure.setting)
            )
            column_by_name = {
                figure.method: "policy",
                figure.dataset: "task",
                figure.budget: "budget",
            }
            column = column_by_name.get(printed, "length")
            run_values = list(dict.fromkeys(cells[column].astype(str)))
            if column == "task":
                run_values += catalogue.task_sets()
            if ours not in run_values:
                raise UserError(f"--use '{printed}={ours}': {unknown(column, ours, run_values)}")
        budgets_before, budgets_after = (
            {figure.kept for figure in figures},
            {self.apply(figure).kept for figure in figures},
        )
        if len(budgets_after) < len(budgets_before):
            raise UserError("--use: two budgets of the table would be the same")

    def apply(self, figure: Figure) -> Figure:
        """Return a published result with replacements applied."""
        replacements = self.replacements
        if figure.method in replacements:
            replacement = replacements[figure.method]
            figure = replace(
                figure,
                policy=replacement,
                row=replacement if figure.row == figure.method else figure.row,
                column=replacement if figure.column == figure.method else figure.column,
            )
        if figure.dataset in replacements:
            figure = replace(figure, task=replacements[figure.dataset])
        if figure.budget and figure.budget in replacements:
            replacement = replacements[figure.budget]
            label_fields = ("part", "row", "group", "column")
            label_texts = {
                field_name: getattr(figure, field_name).replace(figure.budget, replacement)
                for field_name in label_fields
            }
            is_token_count = replacement.isdigit()
            token_budget, fraction = (replacement, "") if is_token_count else ("", replacement)
            figure = replace(figure, **label_texts, tokens=token_budget, fraction=fraction)
        return figure

    def notes(self) -> Iterator[Phrase]:
        """Yield a note that lists the replacements."""
        if self.replacements:
            name_pairs = [
                (Name(replacement), f" for {paper_name}") for paper_name, replacement in self.replacements.items()
            ]
            yield ("Replacements for the paper's settings: ", *_joined(name_pairs), ".")


def _names(figures: Iterable[Figure]) -> dict[str, str]:
    """Return methods, datasets, budgets and lengths of published results, by each of their spellings."""
    spellings: dict[str, str] = {}
    for figure in figures:
        spellings |= {figure.method: figure.method, figure.dataset: figure.dataset}
        spellings |= {
            budget_text: figure.budget for budget_text in (figure.budget, figure.kept) if budget_text and figure.budget
        }
        spellings |= {spelling: figure.method for spelling in [figure.policy] if spelling and spelling != "full"}
        spellings |= {spelling: spelling for spelling in [figure.setting] if spelling in LENGTHS}
    return spellings


def _joined(phrase_pairs: Sequence[tuple[Phrase, ...]]) -> Iterator[Phrase]:
    for pair_index, pair in enumerate(phrase_pairs):
        yield from (", ", *pair) if pair_index else pair
