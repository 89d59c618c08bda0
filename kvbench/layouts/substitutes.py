"""What a run has in place of what a paper measured: `--use NAME=OURS`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvbench.errors import UserError, unknown
from kvbench.harness import catalogue
from kvbench.layouts.measures import Measures
from kvbench.layouts.published import LENGTHS, PublishedLayout
from kvbench.published.figures import Figure
from kvbench.report.table import Name, Phrase


@dataclass(frozen=True)
class Substitutes:
    """What stands in a layout in place of what the paper measured.

    Attributes:
        given: By method, dataset, budget or length as the paper calls it, the run's policy, task,
            budget or length.
    """

    given: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, layout: PublishedLayout, texts: Iterable[str]) -> Substitutes:
        """Read `NAME=OURS`, NAME as printed in the table or as `kvbench published` gives it.

        Raises:
            UserError: The table has no such name.
        """
        given = {}
        for text in texts:
            names = _names(layout.figures)
            # A name may hold "=" itself, and so may what stands for it.
            fitting = [name for name in names if text.startswith(f"{name}=")]
            if not fitting:
                raise unknown(f"name in {layout.name}", text.partition("=")[0], names)
            longest = max(fitting, key=len)
            if not (ours := text[len(longest) + 1 :]):
                raise UserError(f"--use {text}: name what stands for {longest}")
            given[names[longest]] = ours
        return cls(given)

    def check(self, figures: Sequence[Figure], measures: Measures) -> None:
        """Refuse what the runs do not have, and a budget that the table shows already.

        Args:
            figures: The figures of the layout, before anything is put in their place.
            measures: The runs.

        Raises:
            UserError: It names what is wrong.
        """
        cells = measures.cells
        for name, ours in self.given.items():
            f = next(f for f in figures if name in (f.method, f.dataset, f.budget, f.setting))
            kinds = {f.method: "policy", f.dataset: "task", f.budget: "budget"}
            column = kinds.get(name, "length")
            known = list(dict.fromkeys(cells[column].astype(str)))
            if column == "task":
                known += catalogue.task_sets()
            if ours not in known:
                raise UserError(f"--use '{name}={ours}': {unknown(column, ours, known)}")
        before, after = {f.kept for f in figures}, {self.apply(f).kept for f in figures}
        if len(after) < len(before):
            raise UserError("--use: two budgets of the table would be the same")

    def apply(self, figure: Figure) -> Figure:
        """A figure of the layout with what stands in its place."""
        g = self.given
        if figure.method in g:
            new = g[figure.method]
            figure = replace(
                figure,
                policy=new,
                row=new if figure.row == figure.method else figure.row,
                column=new if figure.column == figure.method else figure.column,
            )
        if figure.dataset in g:
            figure = replace(figure, task=g[figure.dataset])
        if figure.budget and figure.budget in g:
            new = g[figure.budget]
            labels = ("part", "row", "group", "column")
            shown = {name: getattr(figure, name).replace(figure.budget, new) for name in labels}
            whole = new.isdigit()
            tokens_, fraction = (new, "") if whole else ("", new)
            figure = replace(figure, **shown, tokens=tokens_, fraction=fraction)
        return figure

    def notes(self) -> Iterator[Phrase]:
        """What stands for what."""
        if self.given:
            pairs = [(Name(ours), f" for {name}") for name, ours in self.given.items()]
            yield ("In place of what the paper has: ", *_joined(pairs), ".")


def _names(figures: Iterable[Figure]) -> dict[str, str]:
    """The methods, datasets, budgets and lengths of figures, by every spelling of them."""
    names: dict[str, str] = {}
    for f in figures:
        names |= {f.method: f.method, f.dataset: f.dataset}
        names |= {text: f.budget for text in (f.budget, f.kept) if text and f.budget}
        names |= {name: f.method for name in [f.policy] if name and name != "full"}
        names |= {name: name for name in [f.setting] if name in LENGTHS}
    return names


def _joined(pairs: Sequence[tuple[Phrase, ...]]) -> Iterator[Phrase]:
    for i, pair in enumerate(pairs):
        yield from (", ", *pair) if i else pair
