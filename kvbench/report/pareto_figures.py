"""The Pareto figures of a report: per task, per group of tasks, and small multiples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvbench.progress import Late, Reporter
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.report.frames import INFORMED, Results, informed_policies, pick, readers, unit_scale
from kvbench.report.front import HELD, READ, MemoryMetric, front_of, with_axis
from kvbench.report.pareto import ByteAxis, draw_panel
from kvbench.tables.figure_files import SavedFigure
from kvbench.tables.plot_style import (
    COLUMN,
    FRONT,
    GREY,
    GREY_BAND,
    MOST_COLOURS,
    PAGE,
    PALE,
    lay_out_figure,
    legend_handle,
    marker_styles,
    plot_style,
    save,
)
from kvbench.tables.text import mean_of, short, slug

_LEAST_PANEL = 1.1  # inches that a panel is wide at least
_LEAST_LABELLED_PANEL = 1.5  # with bytes along the top and names beside the points


_LOG_SCORES_FROM = 10.0  # a larger ratio of distances gets a logarithmic axis


def draw_fronts(
    results: Results, folder: Path, options: FigureOptions = DEFAULT_FIGURES, reporter: Reporter | None = None
) -> list[SavedFigure]:
    """Draw every Pareto figure of a report.

    Per model: `mean-<group>` for the mean over a group of several tasks, `overview-<group>` with the mean and all tasks
    as small multiples, and `pareto-<task>` for each task. If there are several lengths, moments or seeds, the first and
    the last kind have a panel for each. If a policy reads less than it holds, there is a second figure over the bytes
    read, such as `mean-<group>-read`.

    Args:
        results: The results.
        folder: Existing folder for the files.
        options: Formats, sizes and policies of the figures.
        reporter: Progress reporter, told of every task and mean once they take seconds.
    """
    results = options.select(results)
    tasks_by_group = [
        len(results.tasks(model_name, group_name))
        for model_name in results.models
        for group_name in results.groups(model_name)
    ]
    mean_count = sum(task_count > 1 for task_count in tasks_by_group)
    progress = Late(reporter, sum(tasks_by_group) + mean_count, "drawing figures")
    drawn_figures: list[SavedFigure] = []
    with plot_style():
        for model_name in results.models:
            stem_suffix = f"-{slug(model_name)}" if len(results.models) > 1 else ""
            for group_name in results.groups(model_name):
                group_cells = _rows(results.cells, model_name, group_name)
                group_overall = _rows(results.overall, model_name, group_name)
                task_names = results.tasks(model_name, group_name)
                if len(task_names) > 1 and _drawable(group_overall):
                    mean = mean_of(int(group_overall["tasks"].max()))
                    title = f"{short(group_name)}, {mean}{_metric(group_cells)} · {short(model_name)}"
                    figure_stem = folder / f"mean-{slug(group_name)}{stem_suffix}"
                    drawn_figures += _figures(results, model_name, group_overall, title, figure_stem, options)
                if len(task_names) > 1:
                    drawn_figures += _overviews(results, model_name, group_name, folder, stem_suffix, options)
                    progress.advance()
                for task_name in task_names:
                    task_cells = group_cells[group_cells["task"] == task_name]
                    if _drawable(task_cells):
                        title = f"{short(task_name)}{_metric(task_cells)} · {short(model_name)}"
                        figure_stem = folder / f"pareto-{slug(task_name)}{stem_suffix}"
                        drawn_figures += _figures(
                            results, model_name, task_cells, title, figure_stem, options, task_name
                        )
                    progress.advance()
    progress.stop()
    return drawn_figures


def _memories(cell_rows: pd.DataFrame, options: FigureOptions) -> list[MemoryMetric]:
    """Return the memory metrics to draw: bytes read only if they differ from bytes held."""
    memory_metrics = [HELD, READ] if readers(cell_rows) else [HELD]
    return [with_axis(memory, options.x_axis) for memory in memory_metrics]


def _over(memory: MemoryMetric) -> tuple[str, str]:
    """Return suffixes of a figure's title and file stem; empty for what is held."""
    if memory.verb == HELD.verb:
        return "", ""
    return f", over {'tokens' if memory.unit == 'tokens' else 'bytes'} {memory.verb}", f"-{memory.verb}"


def _rows(frame: pd.DataFrame, model_name: str, group_name: str) -> pd.DataFrame:
    """Return the rows of a model and a group that have a score."""
    if not len(frame):
        return frame
    is_selected = (frame["model"] == model_name) & (frame["group"] == group_name)
    return frame[is_selected & (frame["status"] == "ok")]


def _drawable(cell_rows: pd.DataFrame) -> bool:
    """Return whether there is a compressed cache to draw; full alone has no points."""
    return bool(len(cell_rows)) and bool((cell_rows["policy"] != "full").any())


def _metric(cells: pd.DataFrame) -> str:
    """Return the metric for a title, if the tasks share one."""
    metric_names = list(dict.fromkeys(cells["metric"].astype(str)))
    return f", {short(metric_names[0])}" if len(metric_names) == 1 else ""


def _figures(
    results: Results,
    model_name: str,
    cell_rows: pd.DataFrame,
    figure_title: str,
    figure_stem: Path,
    options: FigureOptions,
    task_name: str = "",
) -> list[SavedFigure]:
    """Draw the figures of one task or mean."""
    return [
        _one_figure(results, model_name, cell_rows, figure_title, figure_stem, options, task_name, memory)
        for memory in _memories(cell_rows, options)
    ]


def _one_figure(
    results: Results,
    model_name: str,
    cell_rows: pd.DataFrame,
    figure_title: str,
    figure_stem: Path,
    options: FigureOptions,
    task_name: str,
    memory: MemoryMetric,
) -> SavedFigure:
    """Draw a figure for one memory metric: one column wide, or a grid of panels as wide as the page."""
    variant_panels = [(panel_variant, pick(cell_rows, panel_variant)) for panel_variant in results.variants(model_name)]
    variant_panels = [
        (panel_variant, variant_rows) for panel_variant, variant_rows in variant_panels if _drawable(variant_rows)
    ]
    policy_styles = marker_styles(results.policies)
    pale_policies = _pale_policies((variant_rows for _, variant_rows in variant_panels), memory)
    unit_scaled = unit_scale(cell_rows)
    log_scores = _has_log_scores(cell_rows)
    length_count = len({panel_variant.length for panel_variant, _ in variant_panels})
    column_count = length_count if 1 < length_count <= 3 else min(len(variant_panels), 3)
    left_margin = 0.48 if unit_scaled else 0.62
    column_count = options.panels_across(
        column_count, margins=left_margin + 0.1, gap=0.35, least_width=_LEAST_LABELLED_PANEL
    )
    bytes_on_top = options.x_axis is None
    has_several = len(variant_panels) > 1
    byte_axis = ByteAxis.of(pd.concat([_compressed(variant_rows) for _, variant_rows in variant_panels]), memory)
    figure_title, figure_stem = (
        figure_title + _over(memory)[0],
        figure_stem.with_name(figure_stem.name + _over(memory)[1]),
    )
    legend_handles, legend_labels = _legend(
        cell_rows, policy_styles, pale_policies, options, with_names=not pale_policies or has_several
    )
    if _is_at_chance(cell_rows):
        figure_title += " (the full cache is not above chance)"
    layout = lay_out_figure(
        math.ceil(len(variant_panels) / column_count),
        column_count,
        title=figure_title if options.has_title else "",
        width=options.width or (COLUMN if column_count == 1 else PAGE),
        panel_height=(2.0 if column_count == 1 else 1.7) + 0.3 * bool(pale_policies),
        labels=legend_labels,
        handles=legend_handles,
        x_label=f"{byte_axis.label} (top: bytes)" if bytes_on_top else byte_axis.label,
        y_label=_score_label(unit_scaled, cell_rows, log_scores),
        left_margin=left_margin,
        top_margin=0.05 + 0.17 * has_several + 0.2 * bytes_on_top,
        panel_gap=(0.35, 0.65),
        sharey=True,
    )
    score_limits = _score_limits(cell_rows, unit_scaled, log_scores)
    if pale_policies:  # room for names
        lower_limit, upper_limit = score_limits
        more = (upper_limit / lower_limit) ** 0.1 * upper_limit if log_scores else 1.1 * upper_limit - 0.1 * lower_limit
        score_limits = (lower_limit, more)
    for ax, (variant, variant_rows) in zip(layout.used(len(variant_panels)), variant_panels, strict=True):
        draw_panel(
            ax,
            variant_rows,
            policy_styles,
            byte_axis,
            unit_scaled=unit_scaled,
            score_limits=score_limits,
            log_scores=log_scores,
            panel_width=layout.panel_width,
            bytes_axis=bytes_on_top,
            pale_policies=pale_policies,
            labelled=bool(pale_policies),
            labels=options.labels,
        )
        if has_several:
            ax.set_title(variant.label, loc="left", y=1.0, pad=17 if bytes_on_top else 3)
    return SavedFigure(figure_title, save(layout.figure, figure_stem, options.formats), task_name)


def _overviews(
    results: Results, model_name: str, group_name: str, folder: Path, stem_suffix: str, options: FigureOptions
) -> list[SavedFigure]:
    """Draw all tasks of a group and their mean as small multiples; a figure per length, moment and seed."""
    drawn_figures: list[SavedFigure] = []
    group_cells, group_overall = (_rows(frame, model_name, group_name) for frame in (results.cells, results.overall))
    for variant in results.variants(model_name, group_name):
        variant_cells = pick(group_cells, variant)
        task_panels = [("mean", pick(group_overall, variant) if len(group_overall) else group_overall)]
        task_panels += [
            (task_name, variant_cells[variant_cells["task"] == task_name])
            for task_name in dict.fromkeys(variant_cells["task"].astype(str))
        ]
        task_panels = [(panel_name, panel_rows) for panel_name, panel_rows in task_panels if _drawable(panel_rows)]
        if task_panels:
            figure_title = ", ".join([short(group_name), *[variant.label] * bool(variant.label)])
            figure_title += f"{_metric(variant_cells)} · {short(model_name)}"
            variant_suffix = f"-{slug(variant.label.replace(', ', '-').replace(' ', '-'))}"
            file_stem = f"overview-{slug(group_name)}{variant_suffix if variant.label else ''}{stem_suffix}"
            policy_styles = marker_styles(results.policies)
            drawn_figures += [
                _overview(
                    task_panels,
                    variant_cells,
                    figure_title,
                    policy_styles,
                    folder / file_stem,
                    memory,
                    options,
                )
                for memory in _memories(variant_cells, options)
            ]
    return drawn_figures


def _overview(
    task_panels: Sequence[tuple[str, pd.DataFrame]],
    group_cells: pd.DataFrame,
    figure_title: str,
    policy_styles: Any,
    figure_stem: Path,
    memory: MemoryMetric,
    options: FigureOptions,
) -> SavedFigure:
    unit_scaled = unit_scale(group_cells)
    log_scores = _has_log_scores(pd.concat([panel_rows for _, panel_rows in task_panels]))
    column_count = min(5 if len(task_panels) > 8 else 4, len(task_panels))
    left_margin, panel_gap = (0.48, 0.12) if unit_scaled else (0.62, 0.5 if log_scores else 0.4)
    column_count = options.panels_across(
        column_count, margins=left_margin + 0.1, gap=panel_gap, least_width=_LEAST_PANEL
    )
    byte_axis = ByteAxis.of(pd.concat([_compressed(panel_rows) for _, panel_rows in task_panels]), memory)
    figure_title, figure_stem = (
        figure_title + _over(memory)[0],
        figure_stem.with_name(figure_stem.name + _over(memory)[1]),
    )
    front_panels = [task_panels[0][1]] if task_panels[0][0] == "mean" else [panel_rows for _, panel_rows in task_panels]
    pale_policies = _pale_policies(front_panels, memory)
    legend_handles, legend_labels = _legend(group_cells, policy_styles, pale_policies, options, with_names=True)
    chance_tasks = {
        panel_name for panel_name, panel_rows in task_panels if panel_name != "mean" and _is_at_chance(panel_rows)
    }
    if chance_tasks:
        figure_title += " (° the full cache is not above chance)"
    layout = lay_out_figure(
        math.ceil(len(task_panels) / column_count),
        column_count,
        title=figure_title if options.has_title else "",
        width=options.width or PAGE,
        panel_height=1.2,
        labels=legend_labels,
        handles=legend_handles,
        x_label=byte_axis.label,
        y_label=_score_label(unit_scaled, group_cells, log_scores),
        left_margin=left_margin,
        top_margin=0.22,
        panel_gap=(panel_gap, 0.3),
        sharex=True,
        sharey=unit_scaled,
    )
    for panel_index, (ax, (panel_name, panel_rows)) in enumerate(
        zip(layout.used(len(task_panels)), task_panels, strict=True)
    ):
        draw_panel(
            ax,
            panel_rows,
            policy_styles,
            byte_axis,
            unit_scaled=unit_scaled,
            score_limits=(-3.0, 103.0) if unit_scaled else _score_limits(panel_rows, unit_scaled, log_scores),
            log_scores=log_scores,
            panel_width=layout.panel_width,
            bytes_axis=False,
            pale_policies=pale_policies,
        )
        font_weight = "bold" if panel_name == "mean" else "normal"
        ax.set_title(
            short(panel_name, 20) + " °" * (options.has_title and panel_name in chance_tasks),
            loc="left",
            fontweight=font_weight,
            y=1.0,
            pad=3,
        )
        ax.tick_params(labelbottom=panel_index + column_count >= len(task_panels))
    return SavedFigure(figure_title, save(layout.figure, figure_stem, options.formats))


def _compressed(cell_rows: pd.DataFrame) -> pd.DataFrame:
    return cell_rows[cell_rows["policy"] != "full"]


def _pale_policies(panel_frames: Iterable[pd.DataFrame], memory: MemoryMetric) -> list[str]:
    """Return the policies to draw in grey: those on no front, if there are more policies than colours.

    Policies that see the answer keep their colour.
    """
    compressed_frames = [_compressed(panel_rows).reset_index(drop=True) for panel_rows in panel_frames]
    policy_names = list(
        dict.fromkeys(
            policy_name for panel_points in compressed_frames for policy_name in panel_points["policy"].astype(str)
        )
    )
    if len(policy_names) <= MOST_COLOURS:
        return []
    front_policies = {
        policy
        for panel_points in compressed_frames
        for policy in panel_points["policy"].iloc[front_of(panel_points, memory)]
    }
    front_policies |= {policy for panel_points in compressed_frames for policy in informed_policies(panel_points)}
    return [policy for policy in policy_names if policy not in front_policies]


def _is_at_chance(cell_rows: pd.DataFrame) -> bool:
    """Return whether full was run and is not above chance."""
    return bool((cell_rows["policy"] == "full").any()) and not bool(cell_rows["discriminative"].all())


def _has_log_scores(cell_rows: pd.DataFrame) -> bool:
    """Return whether scores get a logarithmic axis: distances such as KL, of which the smallest matter most."""
    if not len(cell_rows) or cell_rows["higher_is_better"].any():
        return False
    distances = _compressed(cell_rows)["score"].to_numpy(dtype=np.float64)
    distances = distances[np.isfinite(distances)]
    return bool(len(distances)) and bool(distances.min() > 0 and distances.max() > _LOG_SCORES_FROM * distances.min())


def _score_limits(cell_rows: pd.DataFrame, unit_scaled: bool, log_scores: bool) -> tuple[float, float]:
    """Return limits of the score axis that include every interval, at least 10 points apart.

    On a logarithmic axis they include every compressed cache's score and the intervals' upper ends: the full cache's
    distance from itself is a rounding error, many decades below.
    """
    score_values = cell_rows[["score", "score_lo", "score_hi"]].to_numpy(dtype=np.float64)
    score_values = score_values[np.isfinite(score_values)] * (100.0 if unit_scaled else 1.0)
    if log_scores:
        lowest = float(_compressed(cell_rows)["score"].min())
        margin = (float(score_values.max()) / lowest) ** 0.05
        return lowest / margin, float(score_values.max()) * margin
    lower_limit, upper_limit = float(score_values.min()), float(score_values.max())
    padding = max(
        0.05 * (upper_limit - lower_limit),
        (10.0 - (upper_limit - lower_limit)) / 2 if unit_scaled else 1e-6,
    )
    lower_limit, upper_limit = lower_limit - padding, upper_limit + padding
    return (max(-3.0, lower_limit), min(103.0, upper_limit)) if unit_scaled else (lower_limit, upper_limit)


def _score_label(unit_scaled: bool, cell_rows: pd.DataFrame, log_scores: bool = False) -> str:
    """Return the label of the score axis: the metric, if scores are not shown in points."""
    if unit_scaled:
        return "score (0 to 100)"
    metric_names = set(cell_rows["metric"]) if "metric" in cell_rows else set()
    metric_label = short(metric_names.pop()) if len(metric_names) == 1 else "score"
    notes = ["lower is better"] if len(cell_rows) and not cell_rows["higher_is_better"].any() else []
    notes += ["log scale"] if log_scores else []
    return f"{metric_label} ({', '.join(notes)})" if notes else metric_label


def _legend(
    cell_rows: pd.DataFrame,
    policy_styles: Any,
    pale_policies: Sequence[str],
    options: FigureOptions,
    *,
    with_names: bool,
) -> tuple[list[Any], list[str]]:
    """Return legend handles and labels: policies if requested, then the elements of all figures."""
    drawn_policies = [policy for policy in policy_styles if (cell_rows["policy"] == policy).any()]
    named_policies = [policy for policy in drawn_policies if with_names and policy not in pale_policies]
    legend_handles: list[Any] = [legend_handle(policy_styles[policy]) for policy in named_policies]
    informed = informed_policies(cell_rows)
    legend_labels = [options.label(policy) + INFORMED * (policy in informed) for policy in named_policies]
    if pale_policies:
        pale_count = sum(policy in pale_policies for policy in drawn_policies)
        legend_handles.append(Line2D([], [], color=PALE, marker="o", ms=2.5, lw=0.6))
        legend_labels.append(f"{pale_count} other policies")
    if (cell_rows["policy"] == "full").any():
        full_line = Line2D([], [], color=GREY, lw=0.9, ls=(0, (4, 2)))
        legend_handles.append((Patch(color=GREY_BAND, lw=0), full_line))
        legend_labels.append(f"{options.label('full')}, 95% interval")
    legend_handles.append(Line2D([], [], **FRONT))
    return legend_handles, [*legend_labels, "Pareto front"]
