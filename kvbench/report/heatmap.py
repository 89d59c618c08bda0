"""Heat maps for needle-in-a-haystack tasks: score by depth of the needle and length of the context."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvbench.progress import Late, Reporter
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.report.frames import (
    INFORMED,
    SAMPLE_KEY,
    Results,
    budget_order,
    informed_policies,
    metric_title,
    of_moment,
    unit_scale,
    with_depth,
)
from kvbench.stats import Floats
from kvbench.tables.figure_files import SavedFigure
from kvbench.tables.numbers import NumberFormat, number
from kvbench.tables.plot_style import COLUMN, PAGE, SEQUENTIAL, lay_out_figure, plot_style, save
from kvbench.tables.text import counted, short, slug

_FONT_SIZE = 8
_DARK = 0.75
"""Share of the colour scale on which white text is easier to read than black."""
_LETTER = 0.066  # inches per letter of a name
_LENGTH_WIDTH = 0.3  # inches of a tick label such as 128K
_LEFT_MARGIN = 0.48
_BAR_MARGIN = 0.66  # with the colour bar, its numbers and label
_MOST_MAPS = 60
"""Maximum number of maps per figure: a page holds no more, and drawing time is quadratic in their number."""
_FIELD = ["policy", "budget", "depth", "length"]
"""Columns that identify a field of a map; seeds are pooled."""


def draw_heatmaps(
    results: Results, folder: Path, options: FigureOptions = DEFAULT_FIGURES, reporter: Reporter | None = None
) -> list[SavedFigure]:
    """Draw depth by length for every task with depths, with a panel per policy and budget; seeds are pooled.

    Args:
        results: The results.
        folder: Existing folder for the files.
        options: Formats, sizes and policies of the figures.
        reporter: Progress reporter, told of every task once they take seconds.

    Returns:
        The figures; none if no task has depths.
    """
    results = options.select(results)
    depth_samples = with_depth(results)
    drawn_figures: list[SavedFigure] = []
    by_task = depth_samples.groupby(["model", "task"], sort=False)
    progress = Late(reporter, len(by_task), "drawing heat maps")
    with plot_style():
        for (model_name, task_name), task_samples in by_task:
            moments = list(dict.fromkeys(task_samples.loc[task_samples["policy"] != "full", "moment"]))
            for moment in moments or [""]:
                moment_samples = task_samples[of_moment(task_samples, moment)]
                compressed_lengths = moment_samples.loc[moment_samples["policy"] != "full", "length"]
                if len(compressed_lengths):  # lengths with only full have nothing to compare
                    moment_samples = moment_samples[moment_samples["length"].isin(compressed_lengths)]
                base_stem = f"depth-{slug(task_name)}"
                base_stem += f"-{slug(moment)}" if len(moments) > 1 else ""
                base_stem += f"-{slug(model_name)}" if len(results.models) > 1 else ""
                metric_text = ", ".join(dict.fromkeys(moment_samples["metric"].astype(str)))
                figure_title = f"{short(task_name)}, {short(metric_text)} · {short(model_name)}"
                figure_title += f", {short(moment)}" if len(moments) > 1 else ""
                for budget, figure_samples in _split_by_budget(moment_samples):
                    title_suffix = f", budget {budget}" if budget else ""
                    file_stem = f"{base_stem}-{slug(budget)}" if budget else base_stem
                    drawn_figures.append(
                        _heatmap(figure_samples, figure_title + title_suffix, folder / file_stem, results, options)
                    )
            progress.advance()
    progress.stop()
    return drawn_figures


def _split_by_budget(sample_rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield budget and rows of every figure: one with budget "", or one per budget if there are too many maps."""
    is_full = sample_rows["policy"] == "full"
    if len(sample_rows[["policy", "budget"]].drop_duplicates()) <= _MOST_MAPS:
        yield "", sample_rows
        return
    for budget in sorted(set(sample_rows.loc[~is_full, "budget"].astype(str)), key=budget_order):
        yield budget, sample_rows[is_full | (sample_rows["budget"] == budget)]


def _panels(sample_rows: pd.DataFrame, max_across: int, policies: Sequence[str]) -> list[list[tuple[str, str] | None]]:
    """Arrange the panels: policies across, budgets down, full first.

    Args:
        sample_rows: Samples with depth.
        max_across: Maximum number of panels per line.
        policies: Policies in the order of the panels.

    Returns:
        Lines of `(policy, budget)`; None for an empty panel.
    """
    present_pairs = set(zip(sample_rows["policy"], sample_rows["budget"].astype(str), strict=True))
    policy_names = [policy for policy in policies if (sample_rows["policy"] == policy).any()]
    budget_names = sorted(
        {panel_budget for policy, panel_budget in present_pairs if policy != "full"},
        key=budget_order,
    )
    full_pairs = sorted(pair for pair in present_pairs if pair[0] == "full")
    if len(policy_names) == 1:
        flat_pairs = full_pairs + [(policy_names[0], panel_budget) for panel_budget in budget_names]
        return [
            [*flat_pairs[line_start : line_start + max_across]] for line_start in range(0, len(flat_pairs), max_across)
        ]
    panel_lines: list[list[tuple[str, str] | None]] = []
    block_count = math.ceil(len(policy_names) / max(1, max_across - len(full_pairs)))
    block_size = math.ceil(len(policy_names) / max(1, block_count))
    for block_start in range(0, len(policy_names), max(1, block_size)):
        block_policies = policy_names[block_start : block_start + block_size]
        for budget_index, budget in enumerate(budget_names):
            corner_pair = [full_pairs[0] if block_start == 0 and budget_index == 0 else None] if full_pairs else []
            line_pairs = [(policy, budget) for policy in block_policies]
            panel_lines.append([*corner_pair, *(pair if pair in present_pairs else None for pair in line_pairs)])
    return panel_lines or [[*full_pairs]]


def _heatmap(
    sample_rows: pd.DataFrame,
    figure_title: str,
    figure_stem: Path,
    results: Results,
    options: FigureOptions,
) -> SavedFigure:
    lengths, depths = sorted(set(sample_rows["length"])), sorted(set(sample_rows["depth"]))
    # Repeats of a question count once.
    unique_questions = sample_rows.drop_duplicates(["cell", *SAMPLE_KEY])
    question_counts = set(unique_questions.groupby(_FIELD).size().tolist())
    field_means = sample_rows.groupby(_FIELD)["score"].mean().to_numpy(np.float64)
    unit_scaled = unit_scale(sample_rows.assign(full_score=sample_rows["score"]))
    score_scale = 100.0 if unit_scaled else 1.0
    score_letters = max(len(_score_text(score_scale * mean, unit_scaled=unit_scaled)) for mean in field_means)
    field_width = 0.06 + 0.07 * max(3, score_letters) + 0.31 * (len(question_counts) > 1)  # inches per score
    panels_width = (options.width or PAGE) - _LEFT_MARGIN - _BAR_MARGIN
    max_across = max(1, int(panels_width / max(0.6, field_width * len(lengths) + 0.08)))
    panel_lines = _panels(sample_rows, max_across, results.policies)
    column_count = max(len(panel_line) for panel_line in panel_lines)
    lower_limit, upper_limit = (0.0, 100.0) if unit_scaled else (float(field_means.min()), float(field_means.max()))
    figure_width = options.width or (PAGE if column_count > 2 else COLUMN)
    panel_width = (figure_width - _LEFT_MARGIN - _BAR_MARGIN) / column_count
    informed = informed_policies(results.cells)
    panel_titles = [
        [
            pair
            and _name(
                (options.label(pair[0]) + INFORMED * (pair[0] in informed), pair[1]),
                panel_width,
                is_full=pair[0] == "full",
            )
            for pair in line
        ]
        for line in panel_lines
    ]
    title_lines = max(
        panel_title.count("\n") + 1 for panel_line in panel_titles for panel_title in panel_line if panel_title
    )
    count_text = (
        f"n = {counted(min(question_counts), 'question')} per cell"
        if len(question_counts) == 1
        else "questions per cell in brackets"
    )
    score_label = metric_title(str(sample_rows["metric"].iloc[0])) + " (0 to 100)" * unit_scaled
    figure_title += f": {score_label}, {count_text}"
    mean_grids, count_grids = _grids(sample_rows, "mean"), _grids(unique_questions, "count")
    layout = lay_out_figure(
        len(panel_lines),
        column_count,
        title=figure_title if options.has_title else "",
        width=figure_width,
        panel_height=max(1.0 / len(panel_lines), 0.14 * len(depths)),
        x_label="context length, tokens",
        y_label="depth in the context, %",
        left_margin=_LEFT_MARGIN,
        top_margin=0.05 + 0.135 * title_lines,
        panel_gap=(0.08, 0.1 + 0.135 * title_lines),
        right_margin=_BAR_MARGIN,
        sharex=True,
        sharey=True,
    )
    image: Any = None
    for line_index, column_index in np.ndindex(len(panel_lines), column_count):
        ax = layout.axes[line_index, column_index]
        pair = panel_lines[line_index][column_index] if column_index < len(panel_lines[line_index]) else None
        if pair is None:
            ax.set_axis_off()
            continue
        mean_grid, count_grid = (
            field_grid.reindex(index=depths, columns=lengths).to_numpy(np.float64)
            for field_grid in (mean_grids[pair], count_grids[pair])
        )
        scaled_scores = np.ma.masked_invalid(score_scale * mean_grid)
        image = ax.imshow(scaled_scores, cmap=SEQUENTIAL, vmin=lower_limit, vmax=upper_limit, aspect="auto")
        ax.set_title(panel_titles[line_index][column_index], loc="left", y=1.0, pad=2)
        ax.spines[:].set_visible(False)
        length_step = math.ceil(len(lengths) * _LENGTH_WIDTH / layout.panel_width)
        length_labels = [_tokens(length) for length in lengths[::length_step]]
        ax.set_xticks(range(0, len(lengths), length_step), length_labels)
        tick_step = math.ceil(len(depths) / 6)
        ax.set_yticks(
            range(0, len(depths), tick_step),
            [f"{depth:g}" for depth in depths[::tick_step]],
        )
        labels_below = (
            line_index + 1 == len(panel_lines)
            or column_index >= len(panel_lines[line_index + 1])
            or panel_lines[line_index + 1][column_index] is None
        )
        labels_left = column_index == 0 or panel_lines[line_index][column_index - 1] is None
        ax.tick_params(length=0, labelbottom=labels_below, labelleft=labels_left)
        if layout.panel_width < field_width * len(lengths):
            continue  # the scores would overlap; the colour bar tells them
        _annotate(
            ax,
            scaled_scores,
            count_grid if len(question_counts) > 1 else None,
            lower_limit,
            upper_limit,
            unit_scaled=unit_scaled,
        )
    layout.colour_bar(image, score_scale * field_means, score_label)
    return SavedFigure(figure_title, save(layout.figure, figure_stem, options.formats))


def _grids(sample_rows: pd.DataFrame, aggregation: Literal["mean", "count"]) -> dict[tuple[str, str], pd.DataFrame]:
    """Return mean or count of the scores by depth and length, for every policy and budget."""
    return {
        (str(policy), str(budget)): pair_samples.pivot_table(
            values="score", index="depth", columns="length", aggfunc=aggregation
        )
        for (policy, budget), pair_samples in sample_rows.groupby(["policy", "budget"], sort=False)
    }


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _name(pair: tuple[str, str], width: float, *, is_full: bool) -> str:
    """Return the title of a panel, broken at colons, commas and brackets to fit `width` inches."""
    max_letters = int(width / _LETTER)
    if is_full:
        return short(pair[0], max_letters)
    title_lines = [""]
    for fragment in re.split(r"(?<=[:,])|(?= \()", f"{short(pair[0], 60)}, {pair[1]}"):
        if title_lines[-1] and len(title_lines[-1]) + len(fragment) > max_letters:
            title_lines.append("")
        title_lines[-1] += short(fragment, max_letters).lstrip() if not title_lines[-1] else fragment
    return "\n".join(title_lines)


def _annotate(
    ax: Axes,
    scaled_scores: np.ma.MaskedArray[Any, Any],
    field_counts: Floats | None,
    lower_limit: float,
    upper_limit: float,
    *,
    unit_scaled: bool,
) -> None:
    """Write the score into each field, and the number of questions if it varies."""
    for (row_index, column_index), score in np.ndenumerate(np.ma.filled(scaled_scores, np.nan)):
        if np.isnan(score):
            continue
        is_dark = score < lower_limit + _DARK * (upper_limit - lower_limit)
        count_text = f" ({int(field_counts[row_index, column_index])})" if field_counts is not None else ""
        ax.text(
            column_index, row_index, _score_text(score, unit_scaled=unit_scaled) + count_text,
            ha="center", va="center", fontsize=_FONT_SIZE, color="white" if is_dark else "black",
        )  # fmt: skip


def _score_text(score: float, *, unit_scaled: bool) -> str:
    """Return a score as it is written into a field: in whole points, or with four significant digits."""
    return number(score, NumberFormat.NUMBER, digits=0 if unit_scaled else None)
