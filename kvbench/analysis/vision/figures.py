"""Figures: entries per KV head and kind over the decode steps, and kept tokens over the images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor

from kvbench.analysis.maps import Colours, Steps, panels_across, step_maps
from kvbench.analysis.retention.matrices import binned
from kvbench.analysis.vision.image_shares import CellRecord, ImagePrompt, TaskVision, VisionResult
from kvbench.analysis.vision.pictures import draw_kept
from kvbench.analysis.vision.tables import usage
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.tables.plot_style import SEQUENTIAL, plot_style
from kvbench.tables.text import short, slug

_PIXELS = 640
"""Maximum columns of a panel; in longer answers, neighbouring steps are averaged."""

_KINDS = {
    "entries": "all tokens",
    "visual": "visual tokens",
    "vision_start": "vision start",
    "vision_end": "vision end",
}


def draw(result: VisionResult, folder: Path, options: FigureOptions = DEFAULT_FIGURES) -> list[Path]:
    """Draw all figures.

    Args:
        result: Result of the analysis.
        folder: Existing output folder.
        options: Formats, size and labels of the figures.

    Returns:
        The files written.
    """
    with plot_style():
        return [
            path
            for task in result.tasks
            for sample in task.samples
            for path in _prompt(task, sample, *_naming(result, task, sample), folder, options)
        ]


def _naming(result: VisionResult, task: TaskVision, sample: ImagePrompt) -> tuple[str, str]:
    """Return file name suffix and title suffix."""
    suffix, subtitle = slug(task.task), f"{short(task.task)} · {short(task.model)}"
    for attribute in ("model", "length"):
        if len({getattr(other_task, attribute) for other_task in result.tasks}) > 1:
            suffix += f"-{slug(str(getattr(task, attribute)))}"
    if len(task.samples) > 1:
        suffix += f"-{slug(sample.name)}"
    return suffix, f"{subtitle}, sample {short(sample.name)}"


def _prompt(
    task: TaskVision, sample: ImagePrompt, suffix: str, subtitle: str, folder: Path, options: FigureOptions
) -> Iterator[Path]:
    across = panels_across(options)
    by_moment = sorted(sample.records, key=lambda record: record.cell.labels["moment"])
    for moment, group in groupby(by_moment, key=lambda record: record.cell.labels["moment"]):
        traces = list(group)
        title = f"Entries per KV head over decode steps, moment {moment} · {subtitle}"
        is_numbered = len(traces) > across
        for start in range(0, len(traces), across):
            file_name = f"usage-{moment}-{suffix}" + f"-{start // across + 1}" * is_numbered
            chunk = traces[start : start + across]
            yield from _usage(task, sample, chunk, title, folder / file_name, options)
    if sample.views:
        for record in sample.records:
            yield from draw_kept(task, sample, record, suffix, subtitle, folder, options)


def _usage(
    task: TaskVision,
    sample: ImagePrompt,
    traces: Sequence[CellRecord],
    title: str,
    stem: Path,
    options: FigureOptions,
) -> list[Path]:
    """Draw kinds of entries (down) by cells (across), as in the paper's figure 6."""
    usage_counts = [usage(sample, record) for record in traces]
    panel_rows, colours = [], []
    for kind in usage_counts[0]:
        panels = [_panel(record, entries[kind], options) for record, entries in zip(traces, usage_counts, strict=True)]
        panel_rows.append(panels)
        max_count = max(1.0, *(float(values.max()) for _, values, _ in panels))
        colours.append(Colours(SEQUENTIAL, 0.0, max_count, _KINDS[kind]))
    return step_maps(panel_rows, colours, title, "decode step", task.layers, stem, options)


def _panel(record: CellRecord, entries: Tensor, options: FigureOptions) -> Steps:
    """Return a panel of counts `[L, H, steps]`."""
    cell_labels = record.cell.labels
    panel_title = f"{options.label(str(cell_labels['policy']))} at {cell_labels['budget']}"
    return panel_title, binned(entries.flatten(0, 1).double().numpy(), _PIXELS), record.steps
