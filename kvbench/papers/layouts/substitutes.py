"""What a run has in place of what a paper measured: `--use NAME=OURS`."""

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
    """What stands in a layout in place of what the paper measured.

    Attributes:
        replacements: By method, dataset, budget or length as the paper calls it, the run's policy,
            task, budget or length.
    """

    replacements: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, layout: PublishedLayout, options: Iterable[str]) -> Substitutes:
        """Read `NAME=OURS`, NAME as printed in the table or as `kvbench published` gives it.

        Raises:
            UserError: The table has no such name.
        """
        replacements = {}
        for option in options:
            figure_names = _names(layout.figures)
            # A name may hold "=" itself, and so may what stands for it.
            fitting_names = [figure_name for figure_name in figure_names if option.startswith(f"{figure_name}=")]
            if not fitting_names:
                raise unknown(f"name in {layout.name}", option.partition("=")[0], figure_names)
            longest_name = max(fitting_names, key=len)
            if not (replacement := option[len(longest_name) + 1 :]):
                raise UserError(f"--use {option}: name what stands for {longest_name}")
            replacements[figure_names[longest_name]] = replacement
        return cls(replacements)

    def check(self, figures: Sequence[Figure], measures: Measures) -> None:
        """Refuse what the runs do not have, and a budget that the table shows already.

        Args:
            figures: The figures of the layout, before anything is put in their place.
            measures: The runs.

        Raises:
            UserError: It names what is wrong.
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
        """A figure of the layout with what stands in its place."""
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
        """What stands for what."""
        if self.replacements:
            name_pairs = [
                (Name(replacement), f" for {paper_name}") for paper_name, replacement in self.replacements.items()
            ]
            yield ("In place of what the paper has: ", *_joined(name_pairs), ".")


def _names(figures: Iterable[Figure]) -> dict[str, str]:
    """The methods, datasets, budgets and lengths of figures, by every spelling of them."""
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
