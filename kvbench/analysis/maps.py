"""Maps of layers by heads, and how a figure of an analysis is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvbench.analysis.scopes import SCOPE, Row
from kvbench.report.style import COLUMN, PAGE, save, sheet
from kvbench.report.text import short, slug
from kvbench.stats import Floats

MOST_ACROSS = 4
"""Panels side by side."""


Steps: TypeAlias = tuple[str, Floats, int]
"""A panel of `step_maps`: its title, a picture `[layers * heads, columns]`, and the number of steps
that share its columns."""


@dataclass(frozen=True)
class Colours:
    """What the colours of a line of maps mean.

    Attributes:
        name: A colour map of matplotlib.
        low: The number that gets its first colour.
        high: The number that gets its last colour.
        label: What the numbers are.
    """

    name: str
    low: float
    high: float
    label: str


def naming(frame: pd.DataFrame, scope: Row) -> tuple[str, str]:
    """The end of a file's name and of a title: the task and what differs within the frame."""
    end, title = slug(scope["task"]), short(scope["task"])
    for column in SCOPE:
        if column != "task" and frame[column].nunique() > 1:
            end += f"-{slug(scope[column])}"
            title += f", {short(scope[column])}{' tokens' * (column == 'length')}"
    if frame["model"].nunique() == 1:
        title += f" · {short(scope['model'])}"
    return end, title


def picture(part: pd.DataFrame, values: Floats, head: str) -> Floats:
    """Numbers by layer and head `[layers * heads]` as a picture, `[layers, heads]`."""
    return values.reshape(part["layer"].nunique(), part[head].nunique())


def head_maps(
    lines: Sequence[Sequence[tuple[str, Floats]]],
    colours: Sequence[Colours],
    title: str,
    x_label: str,
    layers: Sequence[int],
    stem: Path,
) -> list[Path]:
    """Draw maps of layers (down) by heads (across).

    Args:
        lines: Lines of panels, each with a title and a picture `[layers, heads]`.
        colours: What the colours mean, line by line in turn.
        title: What the figure shows.
        x_label: What kind of head it is.
        layers: The model's own index of each layer.
        stem: The files without their endings.

    Returns:
        The files written.
    """
    across = max(len(line) for line in lines)
    rows = lines[0][0][1].shape[0]
    page = sheet(
        len(lines),
        across,
        title=title,
        width=COLUMN if across == 1 else PAGE * min(1.0, 0.3 + 0.23 * across),
        panel=min(3.2, max(0.8, 0.13 * rows)),
        x_label=x_label,
        y_label="layer",
        top=0.18,
        gap=(0.1, 0.24),
        right=0.85,
        sharex=True,
        sharey=True,
    )
    for y, line in enumerate(lines):
        look = colours[y % len(colours)]
        for x, ax in enumerate(page.axes[y]):
            if x >= len(line):
                ax.set_axis_off()
                # The line above ends here; its heads are named under it.
                if y and x < len(lines[y - 1]):
                    page.axes[y - 1, x].tick_params(labelbottom=True)
                continue
            name, values = line[x]
            image = ax.imshow(
                values, cmap=look.name, vmin=look.low, vmax=look.high, aspect="auto",
                interpolation="nearest",
            )  # fmt: skip
            ax.set_title(name, loc="left", fontsize=7, y=1.0, pad=2)
            ax.spines[:].set_visible(False)
            _ticks(ax, values.shape, layers)
        page.colour_bar(image, [values for _, values in line], look.label, line=y)
    return save(page.figure, stem)


def step_maps(
    lines: Sequence[Sequence[Steps]],
    colours: Sequence[Colours],
    title: str,
    x_label: str,
    layers: Sequence[int],
    stem: Path,
) -> list[Path]:
    """Draw maps of KV heads (down, those of one layer together) by steps (across).

    Args:
        lines: Lines of panels.
        colours: What the colours mean, line by line in turn.
        title: What the figure shows.
        x_label: What a step is.
        layers: The model's own index of each layer.
        stem: The files without their endings.

    Returns:
        The files written.
    """
    across = max(len(line) for line in lines)
    rows = lines[0][0][1].shape[0]
    heads = rows // len(layers)
    page = sheet(
        len(lines),
        across,
        title=title,
        width=COLUMN if across == 1 else PAGE,
        panel=min(3.0, max(1.0, 0.12 * rows)),
        x_label=x_label,
        y_label="layer",
        top=0.2,
        gap=(0.15, 0.3),
        right=0.7,
        sharex="col",
        sharey=True,
    )
    tick = -(-len(layers) // 8)
    for y, line in enumerate(lines):
        look = colours[y % len(colours)]
        for ax, (name, values, steps) in zip(page.axes[y], line, strict=False):
            image = ax.imshow(
                np.ma.masked_invalid(values), cmap=look.name, vmin=look.low, vmax=look.high,
                aspect="auto", interpolation="nearest",
                extent=(-0.5, steps - 0.5, rows - 0.5, -0.5),
            )  # fmt: skip
            ax.set_title(name, loc="left", fontsize=7, y=1.0, pad=2)
            ax.tick_params(length=0, labelsize=6.5)
            ax.locator_params(axis="x", nbins=4, integer=True)
            middles = [heads * (i + 0.5) - 0.5 for i in range(0, len(layers), tick)]
            ax.set_yticks(middles, [str(i) for i in layers[::tick]])
            for i in range(1, len(layers)):
                ax.axhline(heads * i - 0.5, color="white", lw=0.4)
        for ax in page.axes[y, len(line) :]:
            ax.set_axis_off()
        shown = np.concatenate([values.ravel() for _, values, _ in line])
        page.colour_bar(image, shown, look.label, line=y)
    return save(page.figure, stem)


def _ticks(ax: Axes, shape: tuple[int, ...], layers: Sequence[int]) -> None:
    rows, columns = shape
    down, over = math.ceil(rows / 8), math.ceil(columns / 8)
    ax.set_yticks(range(0, rows, down), [str(i) for i in layers[::down]], fontsize=7)
    ax.set_xticks(range(0, columns, over), [str(i) for i in range(0, columns, over)], fontsize=7)
    ax.tick_params(length=0)
