"""The figures: entries of every KV head by kind over the decode steps, and the pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor

from kvbench.analysis.maps import MOST_ACROSS, Colours, Steps, step_maps
from kvbench.analysis.retention.matrices import binned
from kvbench.analysis.vision.measure import Found, Kept, OfTask, Shown
from kvbench.analysis.vision.pictures import draw_kept
from kvbench.analysis.vision.tables import usage
from kvbench.report.style import house_style
from kvbench.report.text import short, slug

_PIXELS = 640
"""Columns of a panel; of a longer answer, neighbouring steps are averaged."""

_KINDS = {
    "entries": "all tokens",
    "visual": "visual tokens",
    "vision_start": "vision start",
    "vision_end": "vision end",
}


def draw(found: Found, folder: Path) -> list[Path]:
    """Draw everything.

    Args:
        found: What was found.
        folder: Where to; it exists.

    Returns:
        The files written.
    """
    with house_style():
        return [
            path
            for task in found.tasks
            for shown in task.shown
            for path in _prompt(task, shown, *_naming(found, task, shown), folder)
        ]


def _naming(found: Found, task: OfTask, shown: Shown) -> tuple[str, str]:
    """The end of a file's name and of a title."""
    end, title = slug(task.task), f"{short(task.task)} · {short(task.model)}"
    for name in ("model", "length"):
        if len({getattr(other, name) for other in found.tasks}) > 1:
            end += f"-{slug(str(getattr(task, name)))}"
    if len(task.shown) > 1:
        end += f"-{slug(shown.name)}"
    return end, f"{title}, sample {short(shown.name)}"


def _prompt(task: OfTask, shown: Shown, end: str, where: str, folder: Path) -> Iterator[Path]:
    by_moment = sorted(shown.kept, key=lambda kept: kept.cell.labels["moment"])
    for moment, group in groupby(by_moment, key=lambda kept: kept.cell.labels["moment"]):
        cells = list(group)
        title = f"Entries per KV head over decode steps, moment {moment} · {where}"
        many = len(cells) > MOST_ACROSS
        for first in range(0, len(cells), MOST_ACROSS):
            name = f"usage-{moment}-{end}" + f"-{first // MOST_ACROSS + 1}" * many
            some = cells[first : first + MOST_ACROSS]
            yield from _usage(task, shown, some, title, folder / name)
    if shown.views:
        for kept in shown.kept:
            yield from draw_kept(task, shown, kept, end, where, folder)


def _usage(task: OfTask, shown: Shown, cells: Sequence[Kept], title: str, stem: Path) -> list[Path]:
    """Kinds of entries down, cells across, as in the paper's figure 6."""
    counts = [usage(shown, kept) for kept in cells]
    lines, colours = [], []
    for kind in counts[0]:
        panels = [
            _panel(kept, found[kind], 34 if len(cells) < 3 else 18)
            for kept, found in zip(cells, counts, strict=True)
        ]
        lines.append(panels)
        high = max(1.0, *(float(values.max()) for _, values, _ in panels))
        colours.append(Colours("viridis", 0.0, high, _KINDS[kind]))
    return step_maps(lines, colours, title, "decode step", task.layers, stem)


def _panel(kept: Kept, counts: Tensor, width: int) -> Steps:
    """A panel of counts `[L, H, steps]`, its policy named in at most `width` characters."""
    labels = kept.cell.labels
    name = f"{short(labels['policy'], width)} at {labels['budget']}"
    return name, binned(counts.flatten(0, 1).double().numpy(), _PIXELS), kept.steps
