"""Heat maps of layers by heads, and names of analysis figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Colormap

from kvbench.analysis.scopes import SCOPE, Row
from kvbench.report.figure_options import FigureOptions
from kvbench.stats import Floats
from kvbench.tables.plot_style import COLUMN, PAGE, PALE, lay_out_figure, save
from kvbench.tables.text import short, slug

_MOST_ACROSS = 4
_LEAST_PANEL = 0.9  # inches
_HEIGHT = 7.0  # inches of all rows of maps, unless that leaves less than 0.8 for each
_SIDE_MARGINS = 1.33  # inches for the axis on the left and the colour bar on the right


Steps: TypeAlias = tuple[str, Floats, int]
"""A panel of `step_maps`: title, image `[layers * heads, columns]`, and number of steps over its columns."""


@dataclass(frozen=True)
class Colours:
    """Colour scale of a row of maps.

    Attributes:
        name: Matplotlib colour map, or its name.
        low: Value of the first colour.
        high: Value of the last colour.
        label: Label of the colour bar.
    """

    name: str | Colormap
    low: float
    high: float
    label: str


def figure_suffixes(frame: pd.DataFrame, scope: Row) -> tuple[str, str]:
    """Return file name suffix and title suffix: the task, and dimensions that vary within the frame."""
    suffix, subtitle = slug(scope["task"]), short(scope["task"])
    for column in SCOPE:
        if column != "task" and frame[column].nunique() > 1:
            suffix += f"-{slug(scope[column])}"
            subtitle += f", {short(scope[column])}{' tokens' * (column == 'length')}"
    if frame["model"].nunique() == 1:
        subtitle += f" · {short(scope['model'])}"
    return suffix, subtitle


def panels_across(options: FigureOptions) -> int:
    """Return how many maps fit side by side, at most 4."""
    room = (options.width or PAGE) - _SIDE_MARGINS
    return max(1, min(_MOST_ACROSS, int(room / _LEAST_PANEL)))


def layer_head_map(cell_rows: pd.DataFrame, head_row: Floats, head_column: str) -> Floats:
    """Arrange values by layer and head as an image, `[layers, heads]`."""
    return head_row.reshape(cell_rows["layer"].nunique(), cell_rows[head_column].nunique())


def head_maps(
    panel_rows: Sequence[Sequence[tuple[str, Floats]]],
    colours: Sequence[Colours],
    title: str,
    x_label: str,
    layers: Sequence[int],
    stem: Path,
    options: FigureOptions,
) -> list[Path]:
    """Draw maps of layers (down) by heads (across).

    Args:
        panel_rows: Rows of panels, each with a title and an image `[layers, heads]`.
        colours: Colour scale of each panel row (cycled).
        title: Figure title.
        x_label: Kind of head.
        layers: The model's index of each layer.
        stem: Output path without suffix.
        options: Formats and size of the figure.

    Returns:
        The files written.
    """
    across = max(len(panels) for panels in panel_rows)
    layer_count = panel_rows[0][0][1].shape[0]
    layout = lay_out_figure(
        len(panel_rows),
        across,
        title=title if options.has_title else "",
        width=options.width or (COLUMN if across == 1 else PAGE * min(1.0, 0.3 + 0.23 * across)),
        panel_height=min(3.2, max(0.8, min(0.13 * layer_count, _HEIGHT / len(panel_rows)))),
        x_label=x_label,
        y_label="layer",
        top_margin=0.18,
        panel_gap=(0.1, 0.24),
        right_margin=0.85,
        sharex=True,
        sharey=True,
    )
    for line_index, panels in enumerate(panel_rows):
        scale = colours[line_index % len(colours)]
        for column, axes in enumerate(layout.axes[line_index]):
            if column >= len(panels):
                axes.set_axis_off()
                # The row above ends here; its x-axis labels go below it.
                if line_index and column < len(panel_rows[line_index - 1]):
                    layout.axes[line_index - 1, column].tick_params(labelbottom=True)
                continue
            panel_title, head_map = panels[column]
            image = axes.imshow(
                head_map,
                cmap=scale.name,
                vmin=scale.low,
                vmax=scale.high,
                aspect="auto",
                interpolation="nearest",
            )
            axes.set_title(short(panel_title, layout.letters), loc="left", y=1.0, pad=2)
            axes.spines[:].set(visible=True, color=PALE)  # the middle of a diverging scale is white
            _ticks(axes, head_map.shape, layers)
        layout.colour_bar(image, [head_map for _, head_map in panels], scale.label, line_index=line_index)
    return save(layout.figure, stem, options.formats)


def step_maps(
    panel_rows: Sequence[Sequence[Steps]],
    colours: Sequence[Colours],
    title: str,
    x_label: str,
    layers: Sequence[int],
    stem: Path,
    options: FigureOptions,
) -> list[Path]:
    """Draw maps of KV heads (down, grouped by layer) by steps (across).

    Args:
        panel_rows: Rows of panels.
        colours: Colour scale of each panel row (cycled).
        title: Figure title.
        x_label: Meaning of a step.
        layers: The model's index of each layer.
        stem: Output path without suffix.
        options: Formats and size of the figure.

    Returns:
        The files written.
    """
    across = max(len(panels) for panels in panel_rows)
    map_height = panel_rows[0][0][1].shape[0]
    heads = map_height // len(layers)
    layout = lay_out_figure(
        len(panel_rows),
        across,
        title=title if options.has_title else "",
        width=options.width or (COLUMN if across == 1 else PAGE),
        panel_height=min(3.0, max(1.0, 0.12 * map_height)),
        x_label=x_label,
        y_label="layer",
        top_margin=0.2,
        panel_gap=(0.15, 0.3),
        right_margin=0.7,
        sharex="col",
        sharey=True,
    )
    tick_spacing = -(-len(layers) // 8)
    for line_index, panels in enumerate(panel_rows):
        scale = colours[line_index % len(colours)]
        for axes, (panel_title, step_map, step_count) in zip(layout.axes[line_index], panels, strict=False):
            image = axes.imshow(
                np.ma.masked_invalid(step_map),
                cmap=scale.name,
                vmin=scale.low,
                vmax=scale.high,
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, step_count - 0.5, map_height - 0.5, -0.5),
            )
            axes.set_title(short(panel_title, layout.letters), loc="left", y=1.0, pad=2)
            axes.tick_params(length=0)
            axes.locator_params(axis="x", nbins=4, integer=True)
            tick_positions = [heads * (layer + 0.5) - 0.5 for layer in range(0, len(layers), tick_spacing)]
            axes.set_yticks(tick_positions, [str(layer) for layer in layers[::tick_spacing]])
            for layer in range(1, len(layers)):
                axes.axhline(heads * layer - 0.5, color="white", lw=0.4)
        for axes in layout.axes[line_index, len(panels) :]:
            axes.set_axis_off()
        values = np.concatenate([step_map.ravel() for _, step_map, _ in panels])
        layout.colour_bar(image, values, scale.label, line_index=line_index)
    return save(layout.figure, stem, options.formats)


def _ticks(axes: Axes, map_shape: tuple[int, ...], layers: Sequence[int]) -> None:
    row_count, column_count = map_shape
    row_spacing, column_spacing = math.ceil(row_count / 8), math.ceil(column_count / 8)
    axes.set_yticks(range(0, row_count, row_spacing), [str(tick) for tick in layers[::row_spacing]])
    axes.set_xticks(
        range(0, column_count, column_spacing),
        [str(tick) for tick in range(0, column_count, column_spacing)],
    )
    axes.tick_params(length=0)
