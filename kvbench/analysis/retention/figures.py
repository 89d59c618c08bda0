"""The figures: matrices and eviction maps head by head, sparsity, survival, entries over steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from kvbench.analysis.maps import MOST_ACROSS, Colours, head_maps, step_maps
from kvbench.analysis.retention.matrices import binned, retention, steps_shown
from kvbench.analysis.retention.measure import Found, OfTask, Shown
from kvbench.analysis.retention.steps import held_at
from kvbench.analysis.retention.tables import criterion
from kvbench.report.style import PAGE, house_style, looks, save, sheet
from kvbench.report.text import counted, short, slug
from kvbench.stats import Floats

_PIXELS = 320
"""Rows and columns of a panel; a longer text is drawn at so many steps, columns averaged."""
_SHARE = ("viridis", 0.0, 1.0)
"""Colour map and limits of numbers from 0 to 1."""


@dataclass(frozen=True)
class Drawn:
    """A figure.

    Attributes:
        paths: Its files, PNG first.
        title: What it shows, in a line.
        task: The number of its task in `Found.tasks`.
    """

    paths: list[Path]
    title: str
    task: int


def draw(found: Found, folder: Path) -> list[Drawn]:
    """Draw everything.

    Args:
        found: What was found.
        folder: Where to; it exists.
    """
    with house_style():
        return [
            Drawn(paths, title, number)
            for number, task in enumerate(found.tasks)
            for paths, title in _task(task, found, folder)
        ]


def _task(task: OfTask, found: Found, folder: Path) -> Iterator[tuple[list[Path], str]]:
    where = task.where
    end, name = slug(where["task"]), f"{short(where['task'])} · {short(where['model'])}"
    for column in ("model", "length"):
        if len({other.where[column] for other in found.tasks}) > 1:
            end += f"-{slug(where[column])}"
            name += f", {where[column]} tokens" * (column == "length")
    n = f"n = {counted(task.count, 'text')}"
    if task.sparsity:
        title = f"Sparsity of the retention matrices · {name}, {n}"
        panels = [(short(p, 24), (sum_ / task.count).numpy()) for p, sum_ in task.sparsity.items()]
        yield _maps(task, panels, "sparsity", "KV head", title, folder / f"sparsity-{end}"), title
    title = f"Survival with the full cache · {name}, {n}"
    yield _survival(task, title, folder / f"survival-{end}"), title
    title = f"Survival by query head at L = {task.survival.at[-1]} · {name}, {n}"
    shares = zip(task.criteria, task.survival.shares()[..., -1], strict=True)
    panels = [(criterion(*which), share.numpy()) for which, share in shares]
    stem = folder / f"survival-heads-{end}"
    yield _maps(task, panels, "tokens alive", "query head", title, stem), title
    for shown in task.shown:
        last = f"{end}-{slug(shown.sample_id)}" if len(task.shown) > 1 else end
        text = f"{name}, sample {short(shown.sample_id)}"
        rows = steps_shown(len(shown.ids), _PIXELS)
        for policy, log_beta in shown.log_beta.items():
            title = f"Retention, {short(policy)} · {text}"
            stem = folder / f"retention-{slug(policy)}-{last}"
            chosen = log_beta[task.draw_layers][:, task.draw_heads]
            values = [[retention(x, rows).numpy() for x in line] for line in chosen]
            yield _matrices(task, values, rows.numpy(), title, "retention", stem), title
        for (policy, budget), trace in shown.traces.items():
            title = f"Held entries, {short(policy)} at {budget} · {text}"
            stem = folder / f"evictions-{slug(policy)}-{slug(budget)}-{last}"
            gone = trace.gone[task.draw_layers][:, task.draw_heads]
            values = [[held_at(x, rows).double().numpy() for x in line] for line in gone]
            yield _matrices(task, values, rows.numpy(), title, "held", stem), title
        if shown.traces:
            title = f"Entries per KV head over steps · {text}"
            yield _entries(task, shown, title, folder / f"entries-{last}"), title


def _maps(
    task: OfTask,
    panels: Sequence[tuple[str, Floats]],
    label: str,
    x_label: str,
    title: str,
    stem: Path,
) -> list[Path]:
    """Maps of shares, layers by heads."""
    lines = [panels[i : i + MOST_ACROSS] for i in range(0, len(panels), MOST_ACROSS)]
    return head_maps(lines, [Colours(*_SHARE, label)], title, x_label, task.layers, stem)


def _matrices(
    task: OfTask, values: list[list[Floats]], rows: Floats, title: str, label: str, stem: Path
) -> list[Path]:
    """Small multiples, layers down and KV heads across; above the diagonal there is nothing."""
    across, tokens = len(task.draw_heads), values[0][0].shape[1]
    width = min(PAGE, 0.5 + 1.5 * across + 0.7)
    panel = (width - 0.48 - 0.65 - 0.1 * (across - 1)) / across
    page = sheet(
        len(values),
        across,
        title=title,
        width=width,
        panel=min(panel, 1.5),
        x_label="entry i",
        y_label="step t",
        top=0.2,
        gap=(0.1, 0.24),
        right=0.65,
        sharex=True,
        sharey=True,
    )
    future = np.arange(tokens) > rows[:, None]
    for y, line in enumerate(values):
        for x, picture in enumerate(line):
            shown = binned(np.where(future, np.nan, picture), _PIXELS)
            image = _image(page.axes[y, x], shown, _SHARE, tokens, tokens)
            layer, head = task.layers[task.draw_layers[y]], task.draw_heads[x]
            page.axes[y, x].set_title(
                f"layer {layer}, KV head {head}", loc="left", fontsize=7, y=1.0, pad=2
            )
            page.axes[y, x].locator_params(nbins=3, integer=True)
    page.colour_bar(image, values[0], label)
    return save(page.figure, stem)


def _survival(task: OfTask, title: str, stem: Path) -> list[Path]:
    """Left: mean over layers and query heads for every criterion; then the layers, by criterion."""
    shares, at = task.survival.shares(), task.survival.at
    labels = [criterion(*which) for which in task.criteria]
    marks = looks(labels)
    count = len(task.layers)
    colours = [colormaps["viridis"](i / max(1, count - 1)) for i in range(count)]
    named = range(count) if count <= 4 else sorted({0, count // 2, count - 1})
    handles = [Line2D([], [], color=marks[label][0]) for label in labels]
    handles += [Line2D([], [], color=colours[i], lw=0.7) for i in named]
    columns = min(3, 1 + len(labels))
    page = sheet(
        -(-(1 + len(labels)) // columns),
        columns,
        title=title,
        width=PAGE,
        panel=1.5,
        x_label="horizon L, tokens, log scale from 1 on",
        y_label="tokens alive, %",
        labels=[*labels, *(f"layer {task.layers[i]}" for i in named)],
        handles=handles,
        top=0.22,
        gap=(0.15, 0.3),
        sharex=True,
        sharey=True,
    )
    mean, *axes = page.used(1 + len(labels))
    mean.set_title("mean over layers and query heads", loc="left", y=1.0, pad=3)
    for label, share in zip(labels, shares, strict=True):
        _curve(mean, at, share.mean((0, 1)).numpy(), marks[label][0], 1.0)
    for ax, label, share in zip(axes, labels, shares, strict=True):
        ax.set_title(label, loc="left", y=1.0, pad=3)
        for i in range(count):
            _curve(ax, at, share[i].mean(0).numpy(), colours[i], 0.7)
    mean.set_ylim(0, 102)
    return save(page.figure, stem)


def _curve(ax: Axes, at: Sequence[int], share: Floats, colour: Any, width: float) -> None:
    ax.plot(at, 100 * share, color=colour, lw=width)
    ax.set_xscale("symlog", linthresh=1, linscale=0.3)
    ticks = [0, *(10**k for k in range(6) if 10**k <= at[-1])]
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.minorticks_off()


def _entries(task: OfTask, shown: Shown, title: str, stem: Path) -> list[Path]:
    """Entries of every KV head over the steps; a panel per policy and budget."""
    panels = []
    for (policy, budget), trace in shown.traces.items():
        picture = binned(trace.entries.flatten(0, 1).double().numpy(), 2 * _PIXELS)
        panels.append((f"{short(policy, 34)} at {budget}", picture, len(shown.ids)))
    high = max(float(np.nanmax(picture)) for _, picture, _ in panels)
    lines = [panels[i : i + 2] for i in range(0, len(panels), 2)]
    colours = [Colours("viridis", 0.0, high, "entries")]
    return step_maps(lines, colours, title, "step t", task.layers, stem)


def _image(
    ax: Axes, picture: Floats, colours: tuple[str, float, float], tokens: int, rows: int
) -> AxesImage:
    """A picture whose columns are tokens, however many of them share a column."""
    ax.tick_params(length=0, labelsize=6.5)
    name, low, high = colours
    return ax.imshow(
        np.ma.masked_invalid(picture),
        cmap=name,
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, tokens - 0.5, rows - 0.5, -0.5),
    )
