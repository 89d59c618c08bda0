"""Figures of a benchmark by context, batch, answer length and budget."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvbench.analysis.speed.settings import LARGEST, PROMPT
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
_DECODE_PANELS = {
    "tokens_per_s": ("tokens per second", 1.0),
    "decode_s": ("total decoding time, s", 1.0),
    "ttft_s": ("time to first token, ms", 1e3),
    "kv_bytes_peak": ("KV held at most, MiB", 1 / 2**20),
}
"""Panels if entries are evicted while decoding, the first two as in figures 10 to 12 of DBTrimKV."""
_LEAST_FOUR = 6.0  # inches for four panels side by side
_AXES = {
    "context": "context, tokens",
    "batch": "batch, sequences",
    "generate": "decode steps",
    "chunk": "chunk, tokens",
    "share": "cache kept, %",
    "tokens": "budget, tokens",
}
_BUDGETS = ("share", "tokens")


def draw_bench(summary: pd.DataFrame, folder: Path, options: FigureOptions = DEFAULT_FIGURES) -> list[Path]:
    """Draw a figure per model for every axis with more than one value.

    On the axes of sizes, a line is a policy at one budget; on the axis of budgets, a policy. Prompts that are paired
    with answers share the axis of contexts.

    Args:
        summary: Output of `kvbench.analysis.speed.ratios.summarize`.
        folder: Existing output folder.
        options: Formats, size and labels of the figures.

    Returns:
        The files written.
    """
    frame = summary[summary["error"] == ""].copy()
    budgets = [
        int(tokens) if budget == PROMPT else Budget.parse(str(budget)).per_head(int(tokens))
        for budget, tokens in zip(frame["budget"], frame["context"], strict=True)
    ]
    frame["tokens"], frame["share"] = (
        budgets,
        [100 * kept / tokens for kept, tokens in zip(budgets, frame["context"], strict=True)],
    )
    frame["is_full"] = frame["policy"] == "full"
    paths: list[Path] = []
    with plot_style():
        for model_index, (model, model_rows) in enumerate(frame.groupby("model", sort=False)):
            suffix = f"-{model_index + 1}" if frame["model"].nunique() > 1 else ""
            for axis in _AXES:
                selected, fixed_sizes = _select(model_rows, axis)
                if selected.loc[~selected["is_full"], axis].nunique() > 1:
                    title = f"{model}, medians over repeats; {', '.join(fixed_sizes)}"
                    paths += _figure(selected, axis, title, folder / f"bench-{axis}{suffix}", options)
    return paths


def _select(bench_rows: pd.DataFrame, axis: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of a figure, whose other sizes are fixed at their largest, and the fixed sizes as text."""
    named_budgets = set(bench_rows.loc[~bench_rows["is_full"], "budget"])
    are_tokens = all(budget.isdecimal() for budget in named_budgets)
    if axis in _BUDGETS and are_tokens != (axis == "tokens"):
        return bench_rows.iloc[:0], []
    if axis == "chunk":
        bench_rows = bench_rows[bench_rows["chunk"] > 0]
    is_largest = bench_rows["batch_setting"] == LARGEST
    if axis == "batch":
        bench_rows = bench_rows[~is_largest]
    elif is_largest.any():
        bench_rows = bench_rows[is_largest]
    paired = is_paired(bench_rows)
    if paired and axis == "generate":
        return bench_rows.iloc[:0], []
    fixed_sizes = []
    for other_axis in ("context", "batch", "generate"):
        if other_axis == axis or not len(bench_rows) or (paired and axis == "context" and other_axis == "generate"):
            continue
        if other_axis == "batch" and is_largest.any() and axis != "batch":
            fixed_sizes.append("largest batch that fits")
            continue
        bench_rows = bench_rows[bench_rows[other_axis] == bench_rows[other_axis].max()]
        fixed_sizes.append(f"{_AXES[other_axis]}: {int(bench_rows[other_axis].iloc[0])}")
    return bench_rows, fixed_sizes


def is_paired(bench_rows: pd.DataFrame) -> bool:
    """Return whether every context has decode steps of its own."""
    sizes = bench_rows[["context", "generate"]].drop_duplicates()
    return len(sizes) > 1 and sizes["context"].is_unique and sizes["generate"].is_unique


def _line_names(bench_rows: pd.DataFrame, axis: str, options: FigureOptions) -> list[str]:
    """Return each row's line: the policy, with its budget and moment where there are several."""
    evicting = bench_rows[~bench_rows["is_full"]]
    shows_budget = axis not in _BUDGETS and evicting["budget"].nunique() > 1
    shows_moment = axis != "chunk" and evicting["moment"].nunique() > 1
    full_chunks = bench_rows.loc[bench_rows["is_full"], "chunk"].nunique()
    names = []
    for row in bench_rows.itertuples():
        name = options.label(str(row.policy))
        if shows_budget and not row.is_full:
            name += f" {row.budget}"
        if axis != "chunk" and (full_chunks > 1 and row.chunk if row.is_full else shows_moment):
            name += f" {row.moment}"
        names.append(name)
    return names


def _figure(bench_rows: pd.DataFrame, axis: str, title: str, stem: Path, options: FigureOptions) -> list[Path]:
    bench_rows = bench_rows.assign(line=_line_names(bench_rows, axis, options))
    line_labels = list(dict.fromkeys(bench_rows["line"]))
    styles = marker_styles(line_labels)
    panels = _DECODE_PANELS if "decode" in set(bench_rows["moment"]) else _PANELS
    paired = axis == "context" and is_paired(bench_rows)
    width = options.width or PAGE
    across = 4 if width >= _LEAST_FOUR else 2
    layout = lay_out_figure(
        len(panels) // across,
        across,
        title=title * options.has_title,
        width=width,
        panel_height=1.5 if across == 4 else 1.2,
        x_label="prompt+decode steps, tokens" if paired else _AXES[axis],
        y_label="",
        labels=line_labels,
        handles=[legend_handle(styles[label]) for label in line_labels],
        left_margin=0.42,
        top_margin=0.24,
        panel_gap=(0.42, 0.42),
    )
    for axes, (column, (panel_title, scale)) in zip(layout.axes.flat, panels.items(), strict=True):
        axes.set_title(panel_title, loc="left", x=-0.15, y=1.0, pad=4)
        for label in line_labels:
            line_rows = bench_rows[bench_rows["line"] == label].sort_values(axis)
            if axis == "tokens" and line_rows["is_full"].all():  # the full cache has no budget
                axes.axhline(line_rows[column].iloc[0] * scale, color=styles[label][0], lw=0.9, ls="--")
                continue
            axes.plot(line_rows[axis], line_rows[column] * scale, **marker_options(styles[label]))
        axes.set_ylim(bottom=0)
        shown = bench_rows if axis != "tokens" else bench_rows[~bench_rows["is_full"]]
        if paired or (axis != "share" and shown[axis].max() > 8 * shown[axis].min()):
            ticks = sorted(set(shown[axis]))
            generate_of = dict(zip(shown["context"], shown["generate"], strict=True))
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, labels=[f"{tick}\n+{generate_of[tick]}" if paired else str(tick) for tick in ticks])
            axes.minorticks_off()
    return save(layout.figure, stem, options.formats)
