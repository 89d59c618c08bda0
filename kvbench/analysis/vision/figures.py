"""Figures: entries per KV head and kind over the decode steps, and kept tokens over the images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from torch import Tensor

from kvbench.analysis.maps import MOST_ACROSS, Colours, Steps, step_maps
from kvbench.analysis.retention.matrices import binned
from kvbench.analysis.vision.image_shares import CellRecord, ImagePrompt, TaskVision, VisionResult
from kvbench.analysis.vision.pictures import draw_kept
from kvbench.analysis.vision.tables import usage
from kvbench.tables.plot_style import plot_style
from kvbench.tables.text import short, slug

_PIXELS = 640
"""Maximum columns of a panel; in longer answers, neighbouring steps are averaged."""

_KINDS = {
    "entries": "all tokens",
    "visual": "visual tokens",
    "vision_start": "vision start",
    "vision_end": "vision end",
}


def draw(result: VisionResult, folder: Path) -> list[Path]:
    """Draw all figures.

    Args:
        result: Result of the analysis.
        folder: Existing output folder.

    Returns:
        The files written.
    """
    with plot_style():
        return [
            path
            for task in result.tasks
            for sample in task.samples
            for path in _prompt(task, sample, *_naming(result, task, sample), folder)
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


def _prompt(task: TaskVision, sample: ImagePrompt, suffix: str, subtitle: str, folder: Path) -> Iterator[Path]:
    by_moment = sorted(sample.records, key=lambda record: record.cell.labels["moment"])
    for moment, group in groupby(by_moment, key=lambda record: record.cell.labels["moment"]):
        traces = list(group)
        title = f"Entries per KV head over decode steps, moment {moment} · {subtitle}"
        is_numbered = len(traces) > MOST_ACROSS
        for start in range(0, len(traces), MOST_ACROSS):
            file_name = f"usage-{moment}-{suffix}" + f"-{start // MOST_ACROSS + 1}" * is_numbered
            chunk = traces[start : start + MOST_ACROSS]
            yield from _usage(task, sample, chunk, title, folder / file_name)
    if sample.views:
        for record in sample.records:
            yield from draw_kept(task, sample, record, suffix, subtitle, folder)


def _usage(task: TaskVision, sample: ImagePrompt, traces: Sequence[CellRecord], title: str, stem: Path) -> list[Path]:
    """Draw kinds of entries (down) by cells (across), as in the paper's figure 6."""
    usage_counts = [usage(sample, record) for record in traces]
    panel_rows, colours = [], []
    for kind in usage_counts[0]:
        panels = [
            _panel(record, entries[kind], 34 if len(traces) < 3 else 18)
            for record, entries in zip(traces, usage_counts, strict=True)
        ]
        panel_rows.append(panels)
        max_count = max(1.0, *(float(values.max()) for _, values, _ in panels))
        colours.append(Colours("viridis", 0.0, max_count, _KINDS[kind]))
    return step_maps(panel_rows, colours, title, "decode step", task.layers, stem)


def _panel(record: CellRecord, entries: Tensor, name_width: int) -> Steps:
    """Return a panel of counts `[L, H, steps]`, with the policy's name cut to `name_width` characters."""
    cell_labels = record.cell.labels
    panel_title = f"{short(cell_labels['policy'], name_width)} at {cell_labels['budget']}"
    return panel_title, binned(entries.flatten(0, 1).double().numpy(), _PIXELS), record.steps
