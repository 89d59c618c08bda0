"""Layouts of published tables for the models of runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvbench.errors import UserError
from kvbench.papers.layouts.from_papers import LENGTHS, PublishedLayout, datasets, task_weights
from kvbench.papers.layouts.measures import Config, Measures, ScoreSource, Weights
from kvbench.papers.layouts.published_rows import PublishedRows
from kvbench.papers.layouts.slots import ComputedSlot, Layout, LayoutRow, MeasuredSlot, Slot
from kvbench.papers.layouts.substitutes import Substitutes
from kvbench.papers.published.beside import MOMENTS
from kvbench.papers.published.claims import Claim, claims
from kvbench.papers.published.results import SCORES, Figure, papers, published_spelling
from kvbench.tables.table import Column, Name, Phrase, TableCell
from kvbench.tables.text import listed, tokens

_BETTER = {"loss %": "lower", "share %": "higher", "change %": "higher"}
"""Direction of metrics that are computed from scores."""

_HEADINGS = {"Summarization (second)": "Few-shot"}
"""Corrections of headings misprinted in the papers."""


def lay_out(
    published_layout: PublishedLayout,
    measures: Measures,
    substitutes: Substitutes,
    *,
    reduced: bool = False,
    with_published: bool = False,
    labels: Mapping[str, str] | None = None,
) -> Layout:
    """Return the layout of a published table for the models of runs, with a block of rows per model.

    Args:
        published_layout: The published table.
        measures: The runs.
        substitutes: Replacements for the paper's policies, tasks, budgets and lengths.
        reduced: Whether to leave out rows and columns without results. Averages are then over the remaining columns.
        with_published: Whether to show the paper's results below every row.
        labels: Names to show for policies, instead of the paper's.

    Raises:
        UserError: kvbench or the runs have nothing to fill in, or the runs have several lengths, moments or seeds.
    """
    substitutes.check(published_layout.figures, measures)
    figures = _as_run([substitutes.apply(figure) for figure in published_layout.figures], measures)
    builder = _Builder(published_layout, measures, figures, substitutes, labels or {})
    if not builder.direct:
        hint = "; use --use 'NAME=TASK' to fill it in from another task" * bool(datasets(figures))
        raise UserError(f"{published_layout.name} cannot be filled: {published_layout.lacking}{hint}")
    if not any(builder.present(figure) for figure in builder.direct if figure.policy != "full"):
        raise UserError(_nothing_fits(published_layout, builder.direct, measures))
    all_claims = builder.claims
    if reduced:
        figures = builder.reduced()
        builder = _Builder(published_layout, measures, figures, substitutes, labels or {})
    published_by_model = {}
    if with_published:
        all_figures = _as_run([substitutes.apply(figure) for figure in published_layout.measured_figures], measures)
        published_by_model = {
            model_name: PublishedRows(all_figures, figures[0].model, model_name, builder.claims, all_claims)
            for model_name in builder.models
        }
    layout = builder.layout(reduced=len(figures) < len(published_layout.figures), published=published_by_model)
    notes = [note for published_rows in published_by_model.values() for note in published_rows.notes()]
    return replace(layout, notes=(*layout.notes, *notes))


class _Builder:
    """Builds the layout of one published table for the models of runs."""

    def __init__(
        self,
        published_layout: PublishedLayout,
        measures: Measures,
        figures: list[Figure],
        substitutes: Substitutes,
        labels: Mapping[str, str],
    ) -> None:
        self.printed, self.measures, self.figures = published_layout, measures, figures
        self.substitutes, self.labels = substitutes, measures.policy_labels(labels)
        run_tasks = set(measures.cells["task"].astype(str))
        self.weights = {figure: task_weights(figure, run_tasks) for figure in figures}
        # A table that prints a result of the full cache in several places has a claim for one of them.
        claim_by_measurement = {
            _measurement(claim.figure): claim
            for claim in claims(published_layout.paper, published_layout.table.number, figures, of_a_run=True)
        }
        claim_by_figure = {
            figure: claim_by_measurement[_measurement(figure)]
            for figure in figures
            if _measurement(figure) in claim_by_measurement
        }
        # The mean of a single task is measured; a mean of several tasks is computed as in the paper.
        self.claims: dict[Figure, Claim] = {
            figure: claim for figure, claim in claim_by_figure.items() if len(self.weights[figure]) != 1
        }
        self.models = list(dict.fromkeys(measures.cells["model"].astype(str)))
        self.moment, self.seed = self._moment(), _single(measures, "seed")
        self.length = self._length()

    @property
    def direct(self) -> list[Figure]:
        """Published results for which a run can have a score."""
        return [figure for figure in self.figures if figure.policy and figure.kept and self.weights[figure]]

    def present(self, figure: Figure) -> bool:
        """Return whether the runs have the score for a published result."""
        return any(
            all(self._measured(figure, model_name, source) for source, _ in self.weights[figure])
            for model_name in self.models
        )

    def reduced(self) -> list[Figure]:
        """Return the published results in rows and columns for which the runs have any score."""
        measured_figures = [figure for figure in self.direct if figure not in self.claims and self.present(figure)]
        row_keys, column_keys = (
            {_row(figure) for figure in measured_figures},
            {_column(figure) for figure in measured_figures},
        )
        # Keep averages and losses of the remaining rows and columns.
        row_keys |= {
            _row(figure) for figure in self.claims if _column(figure) in column_keys and _is_line(figure, self, _row)
        }
        column_keys |= {
            _column(figure) for figure in self.claims if _row(figure) in row_keys and _is_line(figure, self, _column)
        }
        return [figure for figure in self.figures if _row(figure) in row_keys and _column(figure) in column_keys]

    def layout(self, *, reduced: bool, published: Mapping[str, PublishedRows]) -> Layout:
        """Return the layout, with the paper's results, by model, if given."""
        figures_by_column: dict[tuple[str, str], list[Figure]] = {}
        for figure in self.figures:
            figures_by_column.setdefault(_column(figure), []).append(figure)
        column_keys = list(figures_by_column)
        figures_by_row: dict[tuple[str, str], dict[tuple[str, str], Figure]] = {}
        for figure in self.figures:
            figures_by_row.setdefault(_row(figure), {})[_column(figure)] = figure
        has_parts = len({row_part for row_part, _ in figures_by_row}) > 1
        decimals_by_metric: dict[str, int] = {}
        for figure in self.figures:
            decimals_by_metric[figure.metric] = max(figure.decimals, decimals_by_metric.get(figure.metric, 0))
        layout_rows: list[LayoutRow] = []
        digits: dict[Slot, int] = {}
        for model_name in self.models:
            slot_by_figure: dict[Figure, Slot | None] = {}
            for (row_part, row_label), row_figures in figures_by_row.items():
                row_slots = [
                    self._slot(row_figures[column_key], model_name, slot_by_figure)
                    if column_key in row_figures
                    else None
                    for column_key in column_keys
                ]
                row_budget = next(
                    (figure.kept for figure in row_figures.values() if figure.kept != "full"),
                    "full",
                )
                lead_cells: list[TableCell] = [Name(model_name)] * (len(self.models) > 1)
                lead_cells += [Name(row_budget)] * has_parts
                group_name = f"{model_name}\0{row_part}"
                if not has_parts and all(figure.policy == "full" for figure in row_figures.values()):
                    group_name = f"{model_name}\0full"
                lead_cells.append(self._label(row_label, row_figures.values()))
                published_cells: tuple[TableCell, ...] = ()
                if model_name in published:
                    published_cells = tuple(
                        published[model_name].cell(row_figures[column_key]) if column_key in row_figures else None
                        for column_key in column_keys
                    )
                layout_rows.append(LayoutRow(tuple(lead_cells), tuple(row_slots), group_name, published_cells))
            digits |= {
                slot: decimals_by_metric[figure.metric] for figure, slot in slot_by_figure.items() if slot is not None
            }
        lead_columns = [Column("model", merged=True)] * (len(self.models) > 1)
        lead_columns += [Column("budget", merged=True)] * has_parts
        return Layout(
            self._title(has_parts),
            (*lead_columns, Column("")),
            tuple(
                (self._label(column_title, column_figures), _HEADINGS.get(group_name, group_name))
                for (group_name, column_title), column_figures in figures_by_column.items()
            ),
            tuple(layout_rows),
            tuple(self._notes(reduced=reduced)),
            self.labels,
            digits,
        )

    def _label(self, printed_label: str, line_figures: Iterable[Figure]) -> Phrase:
        """Return the label of a row or column: that of its policy, or the paper's, with "ours" spelled out."""
        line_policies = {figure.policy for figure in line_figures}
        if len(line_policies) == 1 < len({figure.policy for figure in self.figures}):
            (policy,) = line_policies
            if policy in self.labels:
                return self.labels[policy]
        return re.sub(r"\bours\b", self._paper_title, printed_label)

    @property
    def _paper_title(self) -> str:
        return papers()[self.printed.paper].title.partition(":")[0]

    def _title(self, has_parts: bool) -> tuple[Phrase, ...]:
        budgets = list(dict.fromkeys(figure.kept for figure in self.figures if figure.kept not in ("", "full")))
        paper = papers()[self.printed.paper]
        budget_phrase: tuple[Phrase, ...] = ()
        if len(budgets) == 1 and not has_parts:
            budget_phrase = (", budget ", Name(budgets[0]))
        model_phrase: tuple[Phrase, ...] = (" of ", Name(self.models[0])) if len(self.models) == 1 else ()
        return (
            "Scores", self.measures.metric_suffix, *model_phrase, *budget_phrase,
            f", laid out like Table {self.printed.table.number} of {self._paper_title} (arXiv {paper.arxiv}).",
        )  # fmt: skip

    def _notes(self, *, reduced: bool) -> Iterator[Phrase]:
        yield from self.substitutes.notes()
        paper_moments = {MOMENTS[figure.setting] for figure in self.figures if figure.setting in MOMENTS}
        if paper_moments and paper_moments != {self.moment.partition(":")[0]}:
            yield f"The paper compressed at the moment {' or '.join(sorted(paper_moments))}."
        missing_methods = dict.fromkeys(figure.method for figure in self.figures if not figure.policy)
        if missing_methods:
            yield f"kvbench has no policy for {listed(list(missing_methods))}."
        missing_datasets = datasets(
            figure for figure in self.figures if not self.weights[figure] and figure not in self.claims
        )
        if missing_datasets:
            yield f"kvbench has no task for {listed(missing_datasets)}."
        if reduced:
            yield (
                "Rows and columns of the paper's table without results in the run are left out"
                + "; averages are over the remaining columns" * bool(self.claims)
                + "."
            )

    def _slot(self, figure: Figure, model_name: str, slot_by_figure: dict[Figure, Slot | None]) -> Slot | None:
        """Return the slot for a published result; None if there is none."""
        if figure not in slot_by_figure:
            slot_by_figure[figure] = self._new_slot(figure, model_name, slot_by_figure)
        return slot_by_figure[figure]

    def _new_slot(self, figure: Figure, model_name: str, slot_by_figure: dict[Figure, Slot | None]) -> Slot | None:
        if not (figure.policy and figure.kept):
            return None
        config = self._config(figure, model_name)
        claim = self.claims.get(figure)
        if claim is None:
            weights = self.weights[figure]
            return MeasuredSlot(config, weights) if weights else None
        operand_slots = [self._slot(operand, model_name, slot_by_figure) for operand in claim.of]
        known_slots = [slot for slot in operand_slots if slot is not None]
        if len(known_slots) < len(operand_slots):
            return None
        if figure.metric in SCORES:
            return MeasuredSlot(config, _mean(claim, known_slots))
        better_direction = _BETTER.get(figure.metric, "")
        signed = figure.metric == "change %"
        return ComputedSlot(config, figure.dataset, tuple(known_slots), claim.compute, better_direction, signed)

    def _config(self, figure: Figure, model_name: str) -> Config:
        length = self.length
        if figure.setting in self.substitutes.replacements:
            length = int(self.substitutes.replacements[figure.setting])
        elif figure.setting in LENGTHS:
            run_lengths = set(self.measures.cells["length"])
            fitting_lengths = [token_count for token_count in LENGTHS[figure.setting] if token_count in run_lengths]
            length = (fitting_lengths or [LENGTHS[figure.setting][0]])[0]
        return Config(model_name, figure.policy, figure.kept, self.moment, length, self.seed)

    def _measured(self, figure: Figure, model_name: str, source: ScoreSource) -> bool:
        return self.measures.row(self._config(figure, model_name), source) is not None

    def _moment(self) -> str:
        """Return the moment of the runs to use: the paper's, if available."""
        cells = self.measures.cells
        run_moments = list(dict.fromkeys(cells.loc[cells["policy"] != "full", "moment"].astype(str)))
        paper_moments = {MOMENTS.get(figure.setting, "") for figure in self.figures}
        fitting_moments = [moment for moment in run_moments if moment.partition(":")[0] in paper_moments]
        if len(run_moments) > 1 and len(fitting_moments) != 1:
            moment_list = ", ".join(fitting_moments or run_moments)
            raise UserError(f"the run has the moments {moment_list}; choose one with --moment")
        return (fitting_moments or run_moments or [""])[0]

    def _length(self) -> int:
        measured_tasks = {source.task for source_weights in self.weights.values() for source, _ in source_weights}
        cells = self.measures.cells
        run_lengths = sorted(
            {int(length) for length in cells.loc[cells["task"].isin(measured_tasks), "length"] if length}
        )
        has_fixed_length = any(figure.setting in LENGTHS for figure in self.figures)
        if len(run_lengths) > 1 and not has_fixed_length:
            length_list = ", ".join(map(tokens, run_lengths))
            raise UserError(f"the run has several lengths: {length_list}; choose one with --length")
        return (run_lengths or [0])[0]


def _as_run(figures: Sequence[Figure], measures: Measures) -> list[Figure]:
    """Return published results with the run's spelling of their policies, which may have another buffer."""
    run_policies = list(dict.fromkeys(measures.cells["policy"].astype(str)))
    spellings: dict[str, str] = {}
    for run_policy in run_policies:
        spellings.setdefault(published_spelling(run_policy), run_policy)
    return [
        figure if figure.policy in run_policies else replace(figure, policy=spellings.get(figure.policy, figure.policy))
        for figure in figures
    ]


def _measurement(figure: Figure) -> tuple[str, ...]:
    return figure.method, figure.model, figure.kept, figure.setting, figure.dataset, figure.metric


def _is_line(figure: Figure, builder: _Builder, line_key: Callable[[Figure], tuple[str, str]]) -> bool:
    """Return whether the row or column of a computed result contains only computed results."""
    line_figures = [line_figure for line_figure in builder.figures if line_key(line_figure) == line_key(figure)]
    return all(line_figure in builder.claims or line_figure.metric in _BETTER for line_figure in line_figures)


def _single(measures: Measures, column: str) -> int:
    column_values = sorted({int(number) for number in measures.cells[column]})
    if len(column_values) > 1:
        choices = ", ".join(map(str, column_values))
        raise UserError(f"the run has several values of {column}: {choices}; choose one with --{column}")
    return column_values[0]


def _mean(claim: Claim, operand_slots: Sequence[Slot]) -> Weights:
    """Return the weights of the tasks in a mean that a paper computes from other results."""
    weight_by_source: dict[ScoreSource, float] = {}
    for slot_index, slot in enumerate(operand_slots):
        assert isinstance(slot, MeasuredSlot)
        slot_weight = claim.compute([float(operand_index == slot_index) for operand_index in range(len(operand_slots))])
        for source, weight in slot.weights:
            weight_by_source[source] = weight_by_source.get(source, 0.0) + slot_weight * weight
    assert np.isclose(sum(weight_by_source.values()), 1.0)
    return tuple(weight_by_source.items())


def _row(figure: Figure) -> tuple[str, str]:
    return figure.part, figure.row


def _column(figure: Figure) -> tuple[str, str]:
    return figure.group, figure.column


def _nothing_fits(published_layout: PublishedLayout, figures: Sequence[Figure], measures: Measures) -> str:
    compressed_cells = measures.cells[measures.cells["policy"] != "full"]
    has = [
        listed(list(map(str, dict.fromkeys(compressed_cells[column_name]))), 4)
        for column_name in ("policy", "budget", "task")
    ]
    policy_names = list(dict.fromkeys(figure.policy for figure in figures if figure.policy != "full"))
    budgets = list(dict.fromkeys(figure.kept for figure in figures if figure.policy != "full"))
    tasks = list(dict.fromkeys(figure.task or figure.dataset for figure in figures))
    return (
        f"the run has no result for {published_layout.name}, which shows {listed(policy_names, 4)} at "
        f"{listed(budgets, 4)} on {listed(tasks, 4)}; the run has {has[0]} at {has[1]} on {has[2]}"
    )
