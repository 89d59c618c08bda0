"""Makes the layout of a published table for the models of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvbench.errors import UserError
from kvbench.layouts.measures import Config, Measures, Source, Weights
from kvbench.layouts.published import LENGTHS, PublishedLayout, datasets, task_weights
from kvbench.layouts.slots import Computed, Layout, LayoutRow, Measured, Slot
from kvbench.layouts.substitutes import Substitutes
from kvbench.published.beside import MOMENTS
from kvbench.published.claims import Claim, claims
from kvbench.published.figures import SCORES, Figure, papers
from kvbench.report.table import Cell, Column, Name, Phrase
from kvbench.report.text import listed, tokens

_BETTER = {"loss %": "lower", "share %": "higher", "change %": "higher"}
"""Which numbers are better, of the metrics that are computed from scores."""

_HEADINGS = {"Summarization (second)": "Few-shot"}
"""Headings that the papers misprint, and what they stand above."""


def lay_out(
    one: PublishedLayout, measures: Measures, substitutes: Substitutes, *, reduced: bool = False
) -> Layout:
    """Make a published table's layout for the models of runs: a block of rows for each of them.

    Args:
        one: The published table.
        measures: The runs.
        substitutes: What stands in place of what the paper measured.
        reduced: Whether to leave out rows and columns that the runs have nothing of. Averages are
            then of the columns that stay.

    Raises:
        UserError: kvbench has nothing of what the table shows, the runs have nothing of it, or they
            have several lengths, moments or seeds.
    """
    substitutes.check(one.figures, measures)
    figures = [substitutes.apply(f) for f in one.figures]
    builder = _Builder(one, measures, figures, substitutes)
    if not builder.direct:
        hint = "; --use 'NAME=TASK' fills it in from a task of yours" * bool(datasets(figures))
        raise UserError(f"{one.name} cannot be filled: {one.lacking}{hint}")
    if not any(builder.present(f) for f in builder.direct if f.policy != "full"):
        raise UserError(_nothing_fits(one, builder.direct, measures))
    if reduced:
        figures = builder.reduced()
        builder = _Builder(one, measures, figures, substitutes)
    return builder.layout(reduced=len(figures) < len(one.figures))


class _Builder:
    """Makes the layout of one published table for the models of runs."""

    def __init__(
        self,
        one: PublishedLayout,
        measures: Measures,
        figures: list[Figure],
        substitutes: Substitutes,
    ) -> None:
        self.one, self.measures, self.figures, self.substitutes = (
            one,
            measures,
            figures,
            substitutes,
        )
        own = set(measures.cells["task"].astype(str))
        self.weights = {f: task_weights(f, own) for f in figures}
        by_figure = {c.figure: c for c in claims(one.paper, one.table.number, figures)}
        # A mean that is a task of its own is measured; one of several tasks is what the paper says.
        self.claims: dict[Figure, Claim] = {
            f: c for f, c in by_figure.items() if len(self.weights[f]) != 1
        }
        self.models = list(dict.fromkeys(measures.cells["model"].astype(str)))
        self.moment, self.seed = self._moment(), _single(measures, "seed")
        self.length = self._length()

    @property
    def direct(self) -> list[Figure]:
        """The figures in whose place a run can have a score."""
        return [f for f in self.figures if f.policy and f.kept and self.weights[f]]

    def present(self, figure: Figure) -> bool:
        """Whether the runs have the score that stands in the place of a figure."""
        return any(
            all(self._measured(figure, model, source) for source, _ in self.weights[figure])
            for model in self.models
        )

    def reduced(self) -> list[Figure]:
        """The figures of rows and columns that the runs have something of."""
        plain = [f for f in self.direct if f not in self.claims and self.present(f)]
        rows, columns = {_row(f) for f in plain}, {_column(f) for f in plain}
        # Averages and losses stay beside what they are computed from.
        rows |= {_row(f) for f in self.claims if _column(f) in columns and _is_line(f, self, _row)}
        columns |= {
            _column(f) for f in self.claims if _row(f) in rows and _is_line(f, self, _column)
        }
        return [f for f in self.figures if _row(f) in rows and _column(f) in columns]

    def layout(self, *, reduced: bool) -> Layout:
        """The layout."""
        heads = list(dict.fromkeys(map(_column, self.figures)))
        by_row: dict[tuple[str, str], dict[tuple[str, str], Figure]] = {}
        for f in self.figures:
            by_row.setdefault(_row(f), {})[_column(f)] = f
        parts = len({part for part, _ in by_row}) > 1
        rows = []
        for model in self.models:
            made: dict[Figure, Slot | None] = {}
            for (part, label), own in by_row.items():
                slots = [self._slot(own[h], model, made) if h in own else None for h in heads]
                budget = next((f.kept for f in own.values() if f.kept != "full"), "full")
                lead: list[Cell] = [Name(model)] * (len(self.models) > 1)
                lead += [Name(budget)] * parts
                group = f"{model}\0{part}"
                if not parts and all(f.policy == "full" for f in own.values()):
                    group = f"{model}\0full"
                rows.append(LayoutRow((*lead, label), tuple(slots), group))
        lead_columns = [Column("model", merged=True)] * (len(self.models) > 1)
        lead_columns += [Column("budget", merged=True)] * parts
        return Layout(
            self._title(parts),
            (*lead_columns, Column("")),
            tuple((column, _HEADINGS.get(group, group)) for group, column in heads),
            tuple(rows),
            tuple(self._notes(reduced=reduced)),
        )

    def _title(self, parts: bool) -> tuple[Phrase, ...]:
        budgets = list(dict.fromkeys(f.kept for f in self.figures if f.kept not in ("", "full")))
        paper = papers()[self.one.paper]
        short = paper.title.partition(":")[0]
        at: tuple[Phrase, ...] = ()
        if len(budgets) == 1 and not parts:
            at = (", budget ", Name(budgets[0]))
        of: tuple[Phrase, ...] = (" of ", Name(self.models[0])) if len(self.models) == 1 else ()
        return (
            "Scores", *of, *at,
            f", laid out like Table {self.one.table.number} of {short} (arXiv {paper.arxiv}).",
        )  # fmt: skip

    def _notes(self, *, reduced: bool) -> Iterator[Phrase]:
        yield from self.substitutes.notes()
        asked = {MOMENTS[f.setting] for f in self.figures if f.setting in MOMENTS}
        if asked and asked != {self.moment.partition(":")[0]}:
            yield f"The paper compressed at the moment {' or '.join(sorted(asked))}."
        policies = dict.fromkeys(f.method for f in self.figures if not f.policy)
        if policies:
            yield f"kvbench has no policy for {listed(list(policies))}."
        lost = datasets(f for f in self.figures if not self.weights[f] and f not in self.claims)
        if lost:
            yield f"kvbench has no task for {listed(lost)}."
        if reduced:
            yield (
                "Rows and columns of the paper's table that the run has nothing of are left out"
                + "; averages are of the columns that are here" * bool(self.claims)
                + "."
            )

    def _slot(self, figure: Figure, model: str, made: dict[Figure, Slot | None]) -> Slot | None:
        """What stands in the place of a figure; None if nothing can."""
        if figure not in made:
            made[figure] = self._new_slot(figure, model, made)
        return made[figure]

    def _new_slot(self, figure: Figure, model: str, made: dict[Figure, Slot | None]) -> Slot | None:
        if not (figure.policy and figure.kept):
            return None
        config = self._config(figure, model)
        claim = self.claims.get(figure)
        if claim is None:
            weights = self.weights[figure]
            return Measured(config, weights) if weights else None
        of = [self._slot(f, model, made) for f in claim.of]
        known = [slot for slot in of if slot is not None]
        if len(known) < len(of):
            return None
        if figure.metric in SCORES:
            return Measured(config, _mean(claim, known))
        better = _BETTER.get(figure.metric, "")
        signed = figure.metric == "change %"
        return Computed(config, figure.dataset, tuple(known), claim.compute, better, signed)

    def _config(self, figure: Figure, model: str) -> Config:
        length = self.length
        if figure.setting in self.substitutes.given:
            length = int(self.substitutes.given[figure.setting])
        elif figure.setting in LENGTHS:
            here = set(self.measures.cells["length"])
            fitting = [n for n in LENGTHS[figure.setting] if n in here]
            length = (fitting or [LENGTHS[figure.setting][0]])[0]
        return Config(model, figure.policy, figure.kept, self.moment, length, self.seed)

    def _measured(self, figure: Figure, model: str, source: Source) -> bool:
        return self.measures.row(self._config(figure, model), source) is not None

    def _moment(self) -> str:
        """The moment of the runs that is meant: the paper's if they have it."""
        cells = self.measures.cells
        known = list(dict.fromkeys(cells.loc[cells["policy"] != "full", "moment"].astype(str)))
        wanted = {MOMENTS.get(f.setting, "") for f in self.figures}
        fitting = [m for m in known if m.partition(":")[0] in wanted]
        if len(known) > 1 and len(fitting) != 1:
            some = ", ".join(fitting or known)
            raise UserError(f"the run has the moments {some}; choose one with --moment")
        return (fitting or known or [""])[0]

    def _length(self) -> int:
        tasks = {s.task for weights in self.weights.values() for s, _ in weights}
        cells = self.measures.cells
        lengths = sorted({int(n) for n in cells.loc[cells["task"].isin(tasks), "length"] if n})
        fixed = any(f.setting in LENGTHS for f in self.figures)
        if len(lengths) > 1 and not fixed:
            some = ", ".join(map(tokens, lengths))
            raise UserError(f"the run has several lengths: {some}; choose one with --length")
        return (lengths or [0])[0]


def _is_line(
    figure: Figure, builder: _Builder, line_of: Callable[[Figure], tuple[str, str]]
) -> bool:
    """Whether a computed figure's row or column holds nothing that is measured."""
    line = [f for f in builder.figures if line_of(f) == line_of(figure)]
    return all(f in builder.claims or f.metric in _BETTER for f in line)


def _single(measures: Measures, name: str) -> int:
    values = sorted({int(n) for n in measures.cells[name]})
    if len(values) > 1:
        some = ", ".join(map(str, values))
        raise UserError(f"the run has several values of {name}: {some}; choose one with --{name}")
    return values[0]


def _mean(claim: Claim, of: Sequence[Slot]) -> Weights:
    """The weights of the tasks in a mean that a paper computes from other figures."""
    found: dict[Source, float] = {}
    for i, slot in enumerate(of):
        assert isinstance(slot, Measured)
        share = claim.compute([float(k == i) for k in range(len(of))])
        for source, weight in slot.weights:
            found[source] = found.get(source, 0.0) + share * weight
    assert np.isclose(sum(found.values()), 1.0)
    return tuple(found.items())


def _row(figure: Figure) -> tuple[str, str]:
    return figure.part, figure.row


def _column(figure: Figure) -> tuple[str, str]:
    return figure.group, figure.column


def _nothing_fits(one: PublishedLayout, figures: Sequence[Figure], measures: Measures) -> str:
    cut = measures.cells[measures.cells["policy"] != "full"]
    has = [listed(list(map(str, dict.fromkeys(cut[n]))), 4) for n in ("policy", "budget", "task")]
    policies = list(dict.fromkeys(f.policy for f in figures if f.policy != "full"))
    budgets = list(dict.fromkeys(f.kept for f in figures if f.policy != "full"))
    tasks = list(dict.fromkeys(f.task or f.dataset for f in figures))
    return (
        f"nothing of the run fits {one.name}: it shows {listed(policies, 4)} at "
        f"{listed(budgets, 4)} on {listed(tasks, 4)}; the run has {has[0]} at {has[1]} on {has[2]}"
    )
