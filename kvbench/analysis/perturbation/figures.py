"""Figures of a perturbation analysis: maps of heads, curves over layers and over budgets."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kvbench.analysis.maps import Colours, figure_suffixes, head_maps, layer_head_map, panels_across
from kvbench.analysis.perturbation.comparison import curve, matrix
from kvbench.analysis.scopes import distinct_values, ordered_budgets, rows_in_scope, scopes
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.stats import Floats
from kvbench.tables.plot_style import (
    COLUMN,
    PAGE,
    FigureLayout,
    lay_out_figure,
    legend_handle,
    marker_options,
    marker_styles,
    plot_style,
    save,
)
from kvbench.tables.text import counted, short, slug

MOST_PAIRS = 10
_MOST_CURVES = 3  # panels side by side
_LEAST_CURVE = 1.6  # inches that a panel is wide at least


def shown_pairs(pairs: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the pairs to show: all, or if there are many, those against the first policy."""
    if not len(pairs):
        return []
    all_pairs = list(dict.fromkeys(zip(pairs["policy"], pairs["against"], strict=True)))
    if len(all_pairs) <= MOST_PAIRS:
        return all_pairs
    return [pair for pair in all_pairs if pair[1] == all_pairs[0][1]]


def draw_perturbation(
    heads: pd.DataFrame,
    layers: pd.DataFrame,
    pairs: pd.DataFrame,
    cells: pd.DataFrame,
    folder: Path,
    options: FigureOptions = DEFAULT_FIGURES,
) -> list[Path]:
    """Draw maps of heads for every pair, and curves over layers and over budgets.

    Args:
        heads, layers: The tables of an analysis.
        pairs, cells: What `compare` makes of the table of heads.
        folder: Existing output folder.
        options: Formats, size and labels of the figures.

    Returns:
        The files written.
    """
    paths: list[Path] = []
    curves = _Curves(distinct_values(heads, "policy"), options)
    with plot_style():
        for scope, scope_rows in scopes(heads):
            suffix, subtitle = figure_suffixes(heads, scope)
            for pair in shown_pairs(pairs):
                pair_rows = scope_rows[scope_rows["policy"].isin(pair)]
                file_name = f"heads-{slug(pair[0])}-vs-{slug(pair[1])}-{suffix}"
                paths += _maps(pair_rows, pair, subtitle, folder / file_name, options)
            for policy in distinct_values(scope_rows, "policy"):
                policy_rows = scope_rows[scope_rows["policy"] == policy]
                paths += _assumption_maps(
                    policy_rows, subtitle, folder / f"assumption-{slug(policy)}-{suffix}", options
                )
            layer_rows = rows_in_scope(layers, scope)
            for column, file_name, condition in (
                ("l1", "layers", ""),
                ("l1_forward", "layers-forward", " in a forward on the kept cache"),
            ):
                layer_curve = curve(layer_rows, column)
                if len(layer_curve) and layer_curve["layer"].nunique() > 1:
                    title = f"L1 change of the attention output{condition} · {subtitle}"
                    paths += curves.over_layers(layer_curve, title, folder / f"{file_name}-{suffix}")
            scope_cells = rows_in_scope(cells, scope)
            if scope_cells["budget"].nunique() > 1:
                title = f"L1 change of a head's output, mean over heads and layers · {subtitle}"
                paths += curves.over_budgets(scope_cells, title, folder / f"budgets-{suffix}")
    return paths


def _maps(
    pair_rows: pd.DataFrame, pair: tuple[str, str], subtitle: str, stem: Path, options: FigureOptions
) -> list[Path]:
    """Draw the fraction of questions where the policy perturbs less (above) and its change of mean l1 (below)."""
    budget_maps: list[tuple[str, Floats, Floats]] = []
    questions = 0
    for budget in ordered_budgets(pair_rows):
        policy_frames = [
            pair_rows[(pair_rows["policy"] == policy) & (pair_rows["budget"] == budget)] for policy in pair
        ]
        if not all(len(policy_frame) for policy_frame in policy_frames):
            continue
        (policy_l1, _), (against_l1, _) = (matrix(policy_frame) for policy_frame in policy_frames)
        questions = len(policy_l1)
        win_share = 100 * ((policy_l1 < against_l1) + 0.5 * (policy_l1 == against_l1)).mean(0)
        against_mean = against_l1.mean(0)
        mean_change = 100 * (policy_l1.mean(0) - against_mean) / np.where(against_mean > 0, against_mean, 1.0)
        budget_maps.append(
            (
                budget,
                layer_head_map(pair_rows, win_share, "head"),
                layer_head_map(pair_rows, mean_change, "head"),
            )
        )
    if not budget_maps:
        return []
    widest = max(float(np.abs(change_map).max()) for _, _, change_map in budget_maps)
    limit = min(100.0, max(1.0, math.ceil(widest)))
    panel_rows: list[list[tuple[str, Floats]]] = []
    across = panels_across(options)
    for start in range(0, len(budget_maps), across):
        chunk = budget_maps[start : start + across]
        panel_rows.append([(f"budget {budget}", win_share) for budget, win_share, _ in chunk])
        panel_rows.append([("", mean_change) for _, _, mean_change in chunk])
    colours = [
        Colours("RdBu", 0.0, 100.0, "smaller L1,\n% of questions"),
        Colours("RdBu_r", -limit, limit, "change of\nmean L1, %"),
    ]
    title = (
        f"{short(options.label(pair[0]))} against {short(options.label(pair[1]))}, L1 of a head's output · {subtitle}"
    )
    title += f", n = {counted(questions, 'question')} per head"
    return head_maps(panel_rows, colours, title, "query head", sorted(set(pair_rows["layer"])), stem, options)


def _assumption_maps(policy_rows: pd.DataFrame, subtitle: str, stem: Path, options: FigureOptions) -> list[Path]:
    """Draw the attention that stage 1 collects in every head (figure 8 of CriticalKV), one panel per budget."""
    panels: list[tuple[str, Floats]] = []
    for budget in ordered_budgets(policy_rows):
        budget_rows = policy_rows[policy_rows["budget"] == budget]
        if budget_rows["stage1_mass"].isna().any():  # nothing was evicted, or merging changed the entries
            continue
        collected = matrix(budget_rows, "stage1_mass")[0].mean(0)
        holding = f"{budget}: {100 * float((collected > 0.5).mean()):.1f}% of heads"
        panels.append((holding, layer_head_map(policy_rows, collected, "head")))
    if not panels:
        return []
    across = panels_across(options)
    panel_rows = [panels[start : start + across] for start in range(0, len(panels), across)]
    policy = options.label(str(policy_rows["policy"].iloc[0]))
    title = f"{short(policy)}, attention in stage 1, heads above half · {subtitle}"
    colours = [Colours("RdBu", 0.0, 1.0, "attention\nin stage 1")]
    return head_maps(panel_rows, colours, title, "query head", sorted(set(policy_rows["layer"])), stem, options)


class _Curves:
    """Curves with 95% intervals, one colour and marker per policy.

    Args:
        policies: All policies of the analysis, in order.
        options: Formats, size and labels of the figures.
    """

    def __init__(self, policies: list[str], options: FigureOptions) -> None:
        self.styles, self.options = marker_styles(policies), options

    def over_layers(self, curve_frame: pd.DataFrame, title: str, stem: Path) -> list[Path]:
        """Draw the mean of every layer, one panel per budget."""
        budget_names = ordered_budgets(curve_frame)
        across = min(len(budget_names), _MOST_CURVES, self._most_across)
        layout = self._page(curve_frame, title, math.ceil(len(budget_names) / across), across, "layer")
        for axes, budget in zip(layout.used(len(budget_names)), budget_names, strict=True):
            budget_rows = curve_frame[curve_frame["budget"] == budget]
            axes.set_title(f"budget {budget}", loc="left", y=1.0, pad=3)
            self._lines(axes, budget_rows, lambda policy_rows: policy_rows["layer"].to_numpy(np.float64))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        layout.axes[0, 0].set_ylim(bottom=0)  # after all panels, which share the axis
        return save(layout.figure, stem, self.options.formats)

    def over_budgets(self, cell_rows: pd.DataFrame, title: str, stem: Path) -> list[Path]:
        """Draw the mean over heads and layers by budget, one panel for fractions and one for tokens."""
        curve_frame = cell_rows.rename(columns={"l1": "mean", "l1_lo": "lo", "l1_hi": "hi"})
        scale_kinds = [
            digits_only for digits_only in (False, True) if (curve_frame["budget"].str.isdigit() == digits_only).any()
        ]
        across = min(len(scale_kinds), self._most_across)
        layout = self._page(curve_frame, title, math.ceil(len(scale_kinds) / across), across, "budget, log scale")
        for axes, is_absolute in zip(layout.used(len(scale_kinds)), scale_kinds, strict=True):
            scale_rows = curve_frame[curve_frame["budget"].str.isdigit() == is_absolute]
            scale_rows = scale_rows.assign(at=scale_rows["budget"].astype(float) * (1 if is_absolute else 100))
            scale_rows = scale_rows.sort_values("at")
            self._lines(axes, scale_rows, lambda policy_rows: policy_rows["at"].to_numpy(np.float64))
            axes.set_xscale("log")
            ticks = sorted(set(scale_rows["at"]))
            axes.set_xticks(ticks, [f"{tick:g}" + "%" * (not is_absolute) for tick in ticks])
            axes.minorticks_off()
            axes.set_title("tokens kept" if is_absolute else "share kept", loc="left", y=1.0, pad=3)
        layout.axes[0, 0].set_ylim(bottom=0)
        return save(layout.figure, stem, self.options.formats)

    @property
    def _most_across(self) -> int:
        return max(1, int(((self.options.width or PAGE) - 0.72) / _LEAST_CURVE))

    def _page(self, curve_frame: pd.DataFrame, title: str, row_count: int, across: int, x_label: str) -> FigureLayout:
        has_intervals = np.isfinite(curve_frame[["lo", "hi"]].to_numpy(dtype=np.float64)).all()
        policies = [policy for policy in self.styles if (curve_frame["policy"] == policy).any()]
        return lay_out_figure(
            row_count,
            across,
            title=(title + "; bands: 95% intervals" * bool(has_intervals)) * self.options.has_title,
            width=self.options.width or (COLUMN if across == 1 else PAGE),
            panel_height=2.0 if across == row_count == 1 else 1.6,
            x_label=x_label,
            y_label="L1 change of the output",
            labels=[self.options.label(policy) for policy in policies],
            handles=[legend_handle(self.styles[policy]) for policy in policies],
            left_margin=0.62,
            top_margin=0.22,
            panel_gap=(0.2, 0.35),
            sharey=True,
        )

    def _lines(self, axes: Axes, curve_rows: pd.DataFrame, x_values_of: Callable[[pd.DataFrame], Floats]) -> None:
        for policy, style in self.styles.items():
            policy_rows = curve_rows[curve_rows["policy"] == policy]
            if not len(policy_rows):
                continue
            x_values = x_values_of(policy_rows)
            lower_bounds, upper_bounds = (policy_rows[band_edge].to_numpy(np.float64) for band_edge in ("lo", "hi"))
            if np.isfinite([lower_bounds, upper_bounds]).all():
                axes.fill_between(x_values, lower_bounds, upper_bounds, color=style[0], alpha=0.12, lw=0)
                # Edges distinguish overlapping bands.
                for band_edge in (lower_bounds, upper_bounds):
                    axes.plot(x_values, band_edge, color=style[0], lw=0.4, alpha=0.7)
            axes.plot(x_values, policy_rows["mean"], **marker_options(style))
