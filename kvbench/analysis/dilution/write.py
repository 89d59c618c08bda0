"""Attention dilution of every policy and budget, from a grid to tables and figures.

Nguyen, Cohan, Ying and others: Make Each Token Count, arXiv 2605.09649, section 3.1. With `alpha` the attention of a
query head over the full cache, `U` the useful tokens and `D` all others, the dilution is `delta = sum over D of alpha`.
An eviction that keeps the fractions `rho_U` and `rho_D` of the attention of `U` and `D` has, after the softmax,
`delta_r = rho_D delta / (rho_U (1 - delta) + rho_D delta)`: it dilutes less if `rho_D < rho_U` (Corollary 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.analysis.common import make_grid
from kvbench.analysis.dilution.options import DilutionOptions
from kvbench.analysis.dilution.useful import answer_tokens
from kvbench.analysis.maps import figure_suffixes
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, require_results, write_all
from kvbench.analysis.perturbation import probe
from kvbench.analysis.perturbation.comparison import curve
from kvbench.analysis.scopes import distinct_values, ordered_budgets, scope_heading, scopes
from kvbench.analysis.summary import notes
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.plot_style import (
    COLUMN,
    PAGE,
    lay_out_figure,
    legend_handle,
    marker_options,
    marker_styles,
    plot_style,
    save,
)
from kvbench.tables.table import Column, Name, Table, TableRow
from kvbench.tables.text import counted

_LABELS = ["model", "task", "length", "moment", "policy", "budget", "sample_id", "question_id", "context_id"]
_MEASURES = ["dilution", "kept_dilution", "dilution_bound", "rho_useful", "rho_distractor"]
_MOST_ACROSS = 3
_LEAST_PANEL = 1.1  # inches
_READING = (
    "Useful tokens spell a reference answer in the context; all others are distractors. Dilution: attention that a "
    "query head gives to distractors, mean over heads, layers and questions. Useful and distractors kept: the "
    "attention that the kept tokens of each had with the full cache, as a fraction of all of it (rho_U and rho_D of "
    "Corollary 3.2). Less diluted: share of (question, head) pairs with less dilution than with the full cache."
)


def write_dilution(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    options: DilutionOptions,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench analyze dilution",
) -> AnalysisOutput:
    """Measure attention dilution and write `heads` and `layers.parquet`.

    Args:
        grid_options: Grid options, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        options: All other options.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value in the grid is unknown or out of range, no context holds its answer, or the output is not
            writable.
    """
    grid = make_grid(grid_options)
    folder, figure_settings = prepare_output(grid, "dilution", figures, options.to_dict())
    measured = probe.analyze(grid, reporter, query=options.query, useful_of=answer_tokens, gap=options.gap)
    if not len(measured.heads) and not measured.failed:
        raise UserError(
            "no context contains a reference answer, so no token is known to be useful; use a --task with the answer "
            "in its context, such as niah_single_2"
        )
    require_results(measured.heads, measured.failed)
    heads = measured.heads[[*_LABELS, "layer", "head", "kv_head", "tokens", "entries", *_MEASURES]]
    layers = heads.groupby([*_LABELS, "layer"], sort=False, observed=True)[_MEASURES].mean().reset_index()
    findings = Findings(
        {"heads": heads, "layers": layers},
        list(dilution_tables(heads)),
        notes(heads, measured.failed, [_READING]),
        draw_dilution(layers, folder / "figures", figure_settings),
        measured.failed,
    )
    return write_all(folder, grid, {"analysis": "dilution", **options.to_dict()}, findings, command)


def dilution_tables(heads: pd.DataFrame) -> Iterator[Table]:
    """Yield a table per model, task, length and moment: dilution of the full cache and of every policy."""
    columns = [Column("policy"), Column("budget")] + [
        Column(title, NumberFormat.PERCENT)
        for title in ("dilution", "useful kept", "distractors kept", "less diluted", "bound of Proposition 3.1")
    ]
    for scope, scope_rows in scopes(heads):
        first_cell = scope_rows[
            (scope_rows["policy"] == scope_rows["policy"].iloc[0])
            & (scope_rows["budget"] == scope_rows["budget"].iloc[0])
        ]
        full = (first_cell["dilution"].mean(), 1.0, 1.0, None, first_cell["dilution_bound"].mean())
        rows = [TableRow((Name("full"), Name("full"), *full))]
        for budget in ordered_budgets(scope_rows):
            for policy in distinct_values(scope_rows, "policy"):
                cell_rows = scope_rows[(scope_rows["policy"] == policy) & (scope_rows["budget"] == budget)]
                if len(cell_rows):
                    less_diluted = float((cell_rows["kept_dilution"] < cell_rows["dilution"]).mean())
                    means = [
                        float(cell_rows[name].mean()) for name in ("kept_dilution", "rho_useful", "rho_distractor")
                    ]
                    rows.append(TableRow((Name(policy), Name(budget), *means, less_diluted, None)))
        questions = len(first_cell[["sample_id", "question_id"]].drop_duplicates())
        yield Table(
            (*scope_heading(scope), f": attention dilution, {counted(questions, 'question')}"),
            tuple(columns),
            tuple(rows),
        )


def draw_dilution(layers: pd.DataFrame, folder: Path, options: FigureOptions = DEFAULT_FIGURES) -> list[Path]:
    """Draw dilution by layer, of the full cache and of every policy, one panel per budget.

    Args:
        layers: A row per question, policy, budget and layer.
        folder: Existing output folder.
        options: Formats, size and labels of the figures.

    Returns:
        The files written.
    """
    paths: list[Path] = []
    policies = distinct_values(layers, "policy")
    styles = marker_styles(["full", *policies])
    with plot_style():
        for scope, scope_rows in scopes(layers):
            suffix, subtitle = figure_suffixes(layers, scope)
            budgets = ordered_budgets(scope_rows)
            across = options.panels_across(
                min(len(budgets), _MOST_ACROSS), margins=0.65, gap=0.15, least_width=_LEAST_PANEL
            )
            shown = ["full", *(policy for policy in policies if (scope_rows["policy"] == policy).any())]
            layout = lay_out_figure(
                -(-len(budgets) // across),
                across,
                title=f"attention to distractors, mean over heads and questions · {subtitle}" * options.has_title,
                width=options.width or (COLUMN if across == 1 else PAGE),
                panel_height=1.7,
                x_label="layer",
                y_label="attention dilution, %",
                labels=[options.label(policy) for policy in shown],
                handles=[legend_handle(styles[policy]) for policy in shown],
                left_margin=0.55,
                top_margin=0.2,
                panel_gap=(0.15, 0.35),
                sharey=True,
            )
            for axes, budget in zip(layout.used(len(budgets)), budgets, strict=True):
                budget_rows = scope_rows[scope_rows["budget"] == budget]
                axes.set_title(f"budget {budget}", loc="left", y=1.0, pad=3)
                first = budget_rows[budget_rows["policy"] == budget_rows["policy"].iloc[0]]
                lines = [("full", curve(first, "dilution"))]
                kept = curve(budget_rows, "kept_dilution")
                lines += [(policy, kept[kept["policy"] == policy]) for policy in shown[1:]]
                for policy, line in lines:
                    if not len(line):
                        continue
                    line_options = marker_options(styles[policy]) | ({"ls": "--"} if policy == "full" else {})
                    axes.plot(line["layer"], 100 * line["mean"], **line_options)
                    bounds = 100 * line[["lo", "hi"]].to_numpy(np.float64).clip(max=1)
                    if np.isfinite(bounds).all():
                        axes.fill_between(line["layer"], *bounds.T, color=styles[policy][0], alpha=0.12, lw=0)
                axes.locator_params(axis="x", integer=True)
            paths += save(layout.figure, folder / f"dilution-{suffix}", options.formats)
    return paths
