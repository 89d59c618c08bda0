"""Figures of a benchmark by context, batch, answer length and budget."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvbench.budget import Budget
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.tables.plot_style import (
    PAGE,
    lay_out_figure,
    legend_handle,
    marker_options,
    marker_styles,
    plot_style,
    save,
)

_PANELS = {
    "ttft_s": ("time to first token, ms", 1e3),
    "step_s": ("decode step, ms", 1e3),
    "tokens_per_s": ("tokens per second", 1.0),
    "kv_bytes_live": ("live KV, MiB", 1 / 2**20),
}
_LEAST_FOUR = 6.0  # inches for four panels side by side
_AXES = {
    "context": "context, tokens",
    "batch": "batch, sequences",
    "generate": "decode steps",
    "share": "cache kept, %",
}


def draw_bench(summary: pd.DataFrame, model: str, folder: Path, options: FigureOptions = DEFAULT_FIGURES) -> list[Path]:
    """Draw a figure for every axis with more than one value.

    On the axes of sizes, a line is a policy at one budget; on the axis of budgets, a policy.

    Args:
        summary: Output of `kvbench.analysis.speed.ratios.summarize`.
        model: The model as the user named it.
        folder: Existing output folder.
        options: Formats, size and labels of the figures.

    Returns:
        The files written.
    """
    frame = summary[summary["error"] == ""].copy()
    frame["share"] = [
        100 * Budget.parse(str(budget)).per_head(int(tokens)) / int(tokens)
        for budget, tokens in zip(frame["budget"], frame["context"], strict=True)
    ]
    paths: list[Path] = []
    with plot_style():
        for axis in _AXES:
            other_axes = [candidate for candidate in ("context", "batch", "generate") if candidate != axis]
            selected = frame
            for other_axis in other_axes:  # the other axes are fixed at their largest value
                selected = selected[selected[other_axis] == selected[other_axis].max()]
            if selected[axis].nunique() > 1:
                paths += _figure(selected, axis, other_axes, model, folder / f"bench-{axis}", options)
    return paths


def _figure(
    bench_rows: pd.DataFrame, axis: str, other_axes: list[str], model: str, stem: Path, options: FigureOptions
) -> list[Path]:
    bench_rows = bench_rows.assign(line=[options.label(str(policy)) for policy in bench_rows["policy"]])
    if axis != "share" and bench_rows.loc[bench_rows["policy"] != "full", "budget"].nunique() > 1:
        line_names = bench_rows["line"] + " " + bench_rows["budget"]
        bench_rows["line"] = line_names.where(bench_rows["policy"] != "full", bench_rows["line"])
    line_labels = list(dict.fromkeys(bench_rows["line"]))
    styles = marker_styles(line_labels)
    fixed_sizes = ", ".join(f"{_AXES[label]}: {int(bench_rows[label].iloc[0])}" for label in other_axes)
    width = options.width or PAGE
    across = 4 if width >= _LEAST_FOUR else 2
    layout = lay_out_figure(
        len(_PANELS) // across,
        across,
        title=f"{model}, medians over repeats; {fixed_sizes}" * options.has_title,
        width=width,
        panel_height=1.5 if across == 4 else 1.2,
        x_label=_AXES[axis],
        y_label="",
        labels=line_labels,
        handles=[legend_handle(styles[label]) for label in line_labels],
        left_margin=0.42,
        top_margin=0.24,
        panel_gap=(0.42, 0.42),
    )
    for axes, (column, (panel_title, scale)) in zip(layout.axes.flat, _PANELS.items(), strict=True):
        axes.set_title(panel_title, loc="left", x=-0.15, y=1.0, pad=4)
        for label in line_labels:
            line_rows = bench_rows[bench_rows["line"] == label].sort_values(axis)
            axes.plot(line_rows[axis], line_rows[column] * scale, **marker_options(styles[label]))
        axes.set_ylim(bottom=0)
        if axis != "share" and bench_rows[axis].max() > 8 * bench_rows[axis].min():
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(bench_rows[axis])), labels=sorted(set(bench_rows[axis])))
            axes.minorticks_off()
    return save(layout.figure, stem, options.formats)
