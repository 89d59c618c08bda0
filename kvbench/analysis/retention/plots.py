"""Figures: matrices and eviction maps per head, sparsity, survival, entries over steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from kvbench.analysis.maps import Colours, head_maps, panels_across, step_maps
from kvbench.analysis.retention.matrices import binned, retention, steps_shown
from kvbench.analysis.retention.steps import held_at_steps
from kvbench.analysis.retention.survival import RetentionResult, RetentionText, TaskRetention
from kvbench.analysis.retention.tables import criterion
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.stats import Floats
from kvbench.tables.plot_style import PAGE, SEQUENTIAL, lay_out_figure, marker_styles, plot_style, save
from kvbench.tables.text import counted, short, slug

_PIXELS = 320
"""Maximum rows and columns of a panel; longer texts are subsampled by step and averaged by column."""
_LEAST_CURVE = 1.3  # inches that a panel of curves is wide at least
_SHARE = (SEQUENTIAL, 0.0, 1.0)
"""Colour map and limits of values from 0 to 1."""


@dataclass(frozen=True)
class RetentionFigure:
    """A figure of a retention analysis.

    Attributes:
        paths: Its files, PNG first.
        title: One-line title.
        task: Index of its task in `RetentionResult.tasks`.
    """

    paths: list[Path]
    title: str
    task: int


def draw(result: RetentionResult, folder: Path, options: FigureOptions = DEFAULT_FIGURES) -> list[RetentionFigure]:
    """Draw all figures.

    Args:
        result: Result of the analysis.
        folder: Existing output folder.
        options: Formats, size and labels of the figures; there is always a PNG, which the page shows.
    """
    options = replace(options, formats=("png", *options.formats))
    with plot_style():
        return [
            RetentionFigure(paths, title, task_number)
            for task_number, task in enumerate(result.tasks)
            for paths, title in _task(task, result, folder, options)
        ]


def _task(
    task: TaskRetention, result: RetentionResult, folder: Path, options: FigureOptions
) -> Iterator[tuple[list[Path], str]]:
    labels = task.where
    suffix, subtitle = slug(labels["task"]), f"{short(labels['task'])} · {short(labels['model'])}"
    for column in ("model", "length"):
        if len({other_task.where[column] for other_task in result.tasks}) > 1:
            suffix += f"-{slug(labels[column])}"
            subtitle += f", {labels[column]} tokens" * (column == "length")
    text_count = f"n = {counted(task.count, 'text')}"
    if task.sparsity:
        title = f"Sparsity of the retention matrices · {subtitle}, {text_count}"
        panels = [
            (short(options.label(gated_policy), 24), (total / task.count).numpy())
            for gated_policy, total in task.sparsity.items()
        ]
        yield (
            _maps(task, panels, "sparsity", "KV head", title, folder / f"sparsity-{suffix}", options),
            title,
        )
    title = f"Survival with the full cache · {subtitle}, {text_count}"
    yield _survival(task, title, folder / f"survival-{suffix}", options), title
    title = f"Survival by query head at L = {task.survival.horizons[-1]} · {subtitle}, {text_count}"
    criteria_shares = zip(task.criteria, task.survival.shares()[..., -1], strict=True)
    panels = [(criterion(*in_use), share.numpy()) for in_use, share in criteria_shares]
    stem = folder / f"survival-heads-{suffix}"
    yield _maps(task, panels, "share alive", "query head", title, stem, options), title
    for sample in task.samples:
        sample_suffix = f"{suffix}-{slug(sample.sample_id)}" if len(task.samples) > 1 else suffix
        caption = f"{subtitle}, sample {short(sample.sample_id)}"
        drawn_steps = steps_shown(len(sample.token_ids), _PIXELS)
        for policy, log_beta in sample.log_beta.items():
            title = f"Retention, {short(options.label(policy))} · {caption}"
            stem = folder / f"retention-{slug(policy)}-{sample_suffix}"
            log_betas = log_beta[task.draw_layers][:, task.draw_heads]
            matrices = [
                [retention(head_row, drawn_steps).numpy() for head_row in layer_heads] for layer_heads in log_betas
            ]
            yield _matrices(task, matrices, drawn_steps.numpy(), title, "retention", stem, options), title
        for (policy, budget), trace in sample.traces.items():
            title = f"Held entries, {short(options.label(policy))} at {budget} · {caption}"
            stem = folder / f"evictions-{slug(policy)}-{slug(budget)}-{sample_suffix}"
            evictions = trace.eviction_steps[task.draw_layers][:, task.draw_heads]
            matrices = [
                [held_at_steps(head_row, drawn_steps).double().numpy() for head_row in layer_heads]
                for layer_heads in evictions
            ]
            yield _matrices(task, matrices, drawn_steps.numpy(), title, "share held", stem, options), title
        if sample.traces:
            title = f"Entries per KV head over steps · {caption}"
            yield _entries(task, sample, title, folder / f"entries-{sample_suffix}", options), title


def _maps(
    task: TaskRetention,
    panels: Sequence[tuple[str, Floats]],
    label: str,
    x_label: str,
    title: str,
    stem: Path,
    options: FigureOptions,
) -> list[Path]:
    """Draw maps of fractions, layers by heads."""
    across = panels_across(options)
    panel_rows = [panels[start : start + across] for start in range(0, len(panels), across)]
    return head_maps(panel_rows, [Colours(*_SHARE, label)], title, x_label, task.layers, stem, options)


def _matrices(
    task: TaskRetention,
    matrices: list[list[Floats]],
    drawn_steps: Floats,
    title: str,
    label: str,
    stem: Path,
    options: FigureOptions,
) -> list[Path]:
    """Draw small multiples, layers down and KV heads across; empty above the diagonal."""
    head_count, length = len(task.draw_heads), matrices[0][0].shape[1]
    figure_width = options.width or min(PAGE, 0.5 + 1.5 * head_count + 0.7)
    panel_size = (figure_width - 0.48 - 0.65 - 0.1 * (head_count - 1)) / head_count
    layout = lay_out_figure(
        len(matrices),
        head_count,
        title=title if options.has_title else "",
        width=figure_width,
        panel_height=min(panel_size, 1.5),
        x_label="entry i",
        y_label="step t",
        top_margin=0.2,
        panel_gap=(0.1, 0.24),
        right_margin=0.65,
        sharex=True,
        sharey=True,
    )
    future = np.arange(length) > drawn_steps[:, None]
    for line_index, layer_matrices in enumerate(matrices):
        for column, head_matrix in enumerate(layer_matrices):
            panel_pixels = binned(np.where(future, np.nan, head_matrix), _PIXELS)
            image = _image(layout.axes[line_index, column], panel_pixels, _SHARE, length, length)
            layer, head = task.layers[task.draw_layers[line_index]], task.draw_heads[column]
            layout.axes[line_index, column].set_title(
                _head_title(layer, head, layout.letters), loc="left", y=1.0, pad=2
            )
            layout.axes[line_index, column].locator_params(nbins=3, integer=True)
    layout.colour_bar(image, matrices[0], label)
    return save(layout.figure, stem, options.formats)


def _head_title(layer: int, head: int, letters: int) -> str:
    """Return the title of a head's panel, as long as there is room for it."""
    titles = (f"layer {layer}, KV head {head}", f"layer {layer}, head {head}", f"L{layer}, H{head}")
    return next((title for title in titles if len(title) <= letters), titles[-1])


def _survival(task: TaskRetention, title: str, stem: Path, options: FigureOptions) -> list[Path]:
    """Draw the mean over layers and query heads per criterion (left), then the layers by criterion."""
    shares, horizons = task.survival.shares(), task.survival.horizons
    labels = [criterion(*in_use) for in_use in task.criteria]
    styles = marker_styles(labels)
    layer_count = len(task.layers)
    colours = [SEQUENTIAL(layer_index / max(1, layer_count - 1)) for layer_index in range(layer_count)]
    labelled_layers = range(layer_count) if layer_count <= 4 else sorted({0, layer_count // 2, layer_count - 1})
    handles = [Line2D([], [], color=styles[label][0]) for label in labels]
    handles += [Line2D([], [], color=colours[layer_index], lw=0.7) for layer_index in labelled_layers]
    most_across = max(1, int(((options.width or PAGE) - 0.58) / _LEAST_CURVE))
    column_count = min(3, 1 + len(labels), most_across)
    layout = lay_out_figure(
        -(-(1 + len(labels)) // column_count),
        column_count,
        title=title if options.has_title else "",
        width=options.width or PAGE,
        panel_height=1.5,
        x_label="horizon L, tokens, log scale from 1 on",
        y_label="tokens alive, %",
        labels=[*labels, *(f"layer {task.layers[layer_index]}" for layer_index in labelled_layers)],
        handles=handles,
        top_margin=0.22,
        panel_gap=(0.15, 0.3),
        sharex=True,
        sharey=True,
    )
    mean_axes, *axes = layout.used(1 + len(labels))
    mean_axes.set_title("mean over all heads", loc="left", y=1.0, pad=3)
    for label, share in zip(labels, shares, strict=True):
        _curve(mean_axes, horizons, share.mean((0, 1)).numpy(), styles[label][0], 1.0)
    for panel_axes, label, share in zip(axes, labels, shares, strict=True):
        panel_axes.set_title(label, loc="left", y=1.0, pad=3)
        for layer_index in range(layer_count):
            _curve(panel_axes, horizons, share[layer_index].mean(0).numpy(), colours[layer_index], 0.7)
    mean_axes.set_ylim(0, 102)
    return save(layout.figure, stem, options.formats)


def _curve(axes: Axes, horizons: Sequence[int], share: Floats, colour: Any, line_width: float) -> None:
    axes.plot(horizons, 100 * share, color=colour, lw=line_width)
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)
    ticks = [0, *(10**exponent for exponent in range(6) if 10**exponent <= horizons[-1])]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def _entries(task: TaskRetention, sample: RetentionText, title: str, stem: Path, options: FigureOptions) -> list[Path]:
    """Draw the entries of every KV head over the steps, one panel per policy and budget."""
    panels = []
    for (policy, budget), trace in sample.traces.items():
        entry_map = binned(trace.entries.flatten(0, 1).double().numpy(), 2 * _PIXELS)
        panels.append((f"{short(options.label(policy), 34)} at {budget}", entry_map, len(sample.token_ids)))
    max_entries = max(float(np.nanmax(entry_map)) for _, entry_map, _ in panels)
    across = min(2, panels_across(options) // 2) or 1
    panel_rows = [panels[start : start + across] for start in range(0, len(panels), across)]
    colours = [Colours(SEQUENTIAL, 0.0, max_entries, "entries")]
    return step_maps(panel_rows, colours, title, "step t", task.layers, stem, options)


def _image(axes: Axes, pixels: Floats, scale: tuple[Colormap, float, float], length: int, row_count: int) -> AxesImage:
    """Draw an image with tokens on the x axis; several tokens may share a pixel column."""
    axes.tick_params(length=0)
    colour_map, lowest, highest = scale
    return axes.imshow(
        np.ma.masked_invalid(pixels),
        cmap=colour_map,
        vmin=lowest,
        vmax=highest,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, length - 0.5, row_count - 0.5, -0.5),
    )
