"""The Pareto figures of a report: per task, over a group of tasks, and small multiples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvbench.report.frames import Results, pick, readers, unit_scale
from kvbench.report.front import HELD, READ, Memory
from kvbench.report.pareto import ByteAxis, draw_panel, front_of
from kvbench.report.style import (
    COLUMN,
    FRONT,
    GREY,
    GREY_BAND,
    MOST_COLOURS,
    PAGE,
    PALE,
    Drawn,
    handle,
    house_style,
    looks,
    save,
    sheet,
)
from kvbench.report.text import mean_of, short, slug


def draw_fronts(results: Results, folder: Path) -> list[Drawn]:
    """Draw every Pareto figure of a report.

    Per model: `mean-<group>` for the mean over a group of several tasks, `overview-<group>` with
    the mean and all tasks as small multiples, and `pareto-<task>` for each task. Where there are
    several lengths, moments or seeds, the first and the last have a panel for each. Where a policy
    reads less than it holds, each has a second one over the bytes read, `mean-<group>-read` and so
    on.

    Args:
        results: What to draw.
        folder: Where to; it exists.

    Returns:
        The figures.
    """
    drawn: list[Drawn] = []
    with house_style():
        for model in results.models:
            end = f"-{slug(model)}" if len(results.models) > 1 else ""
            for group in results.groups(model):
                cells = _rows(results.cells, model, group)
                overall = _rows(results.overall, model, group)
                tasks = results.tasks(model, group)
                if len(tasks) > 1 and _drawable(overall):
                    mean = mean_of(int(overall["tasks"].max()))
                    title = f"{short(group)}, {mean}{_metric(cells)} · {short(model)}"
                    stem = folder / f"mean-{slug(group)}{end}"
                    drawn += _figures(results, model, overall, title, stem)
                if len(tasks) > 1:
                    drawn += _overviews(results, model, group, folder, end)
                for task in tasks:
                    rows = cells[cells["task"] == task]
                    if _drawable(rows):
                        title = f"{short(task)}{_metric(rows)} · {short(model)}"
                        stem = folder / f"pareto-{slug(task)}{end}"
                        drawn += _figures(results, model, rows, title, stem, task)
    return drawn


def _memories(rows: pd.DataFrame) -> list[Memory]:
    """What the fronts of some cells are drawn over: bytes read only if they are not all held."""
    return [HELD, *[READ] * bool(readers(rows))]


def _over(memory: Memory) -> tuple[str, str]:
    """Ends of a figure's title and of its files' stem; empty for bytes held."""
    return ("", "") if memory is HELD else (f", over bytes {memory.verb}", f"-{memory.verb}")


def _rows(frame: pd.DataFrame, model: str, group: str) -> pd.DataFrame:
    """The rows of a model and a group that have a score."""
    if not len(frame):
        return frame
    here = (frame["model"] == model) & (frame["group"] == group)
    return frame[here & (frame["status"] == "ok")]


def _drawable(rows: pd.DataFrame) -> bool:
    """Whether there is a compressed cache to draw; full alone is a line without a point."""
    return bool(len(rows)) and bool((rows["policy"] != "full").any())


def _metric(cells: pd.DataFrame) -> str:
    """The metric for a title, if the tasks share one."""
    metrics = list(dict.fromkeys(cells["metric"].astype(str)))
    return f", {short(metrics[0])}" if len(metrics) == 1 else ""


def _figures(
    results: Results, model: str, rows: pd.DataFrame, title: str, stem: Path, task: str = ""
) -> list[Drawn]:
    """The figures of one task or mean."""
    return [_one_figure(results, model, rows, title, stem, task, m) for m in _memories(rows)]


def _one_figure(
    results: Results,
    model: str,
    rows: pd.DataFrame,
    title: str,
    stem: Path,
    task: str,
    memory: Memory,
) -> Drawn:
    """A figure over one count of bytes: one column wide, or a grid of panels over the page."""
    panels = [(v, pick(rows, v)) for v in results.variants(model)]
    panels = [(v, part) for v, part in panels if _drawable(part)]
    looks_of = looks(results.policies)
    pale = _pale((part for _, part in panels), memory)
    unit = unit_scale(rows)
    lengths = len({v.length for v, _ in panels})
    columns = lengths if 1 < lengths <= 3 else min(len(panels), 3)
    several = len(panels) > 1
    x = ByteAxis.of(pd.concat([_compressed(part) for _, part in panels]), memory)
    title, stem = title + _over(memory)[0], stem.with_name(stem.name + _over(memory)[1])
    handles, labels = _legend(rows, looks_of, pale, named=not pale or several)
    if _silent(rows):
        title += " (the full cache is not above chance)"
    page = sheet(
        math.ceil(len(panels) / columns),
        columns,
        title=title,
        width=COLUMN if columns == 1 else PAGE,
        panel=(2.0 if columns == 1 else 1.7) + 0.3 * bool(pale),
        labels=labels,
        handles=handles,
        x_label=f"{x.label} (top: bytes)",
        y_label=_score_label(unit, rows),
        left=0.48 if unit else 0.62,
        top=0.42 if several else 0.25,
        gap=(0.35, 0.65),
        sharey=True,
    )
    low, high = _score_limits(rows, unit)
    limits = (low, high + 0.1 * (high - low) * bool(pale))  # room for names
    for ax, (variant, part) in zip(page.used(len(panels)), panels, strict=True):
        draw_panel(
            ax,
            part,
            looks_of,
            x,
            unit=unit,
            limits=limits,
            width=page.panel_width,
            bytes_axis=True,
            pale=pale,
            labelled=bool(pale),
        )
        if several:
            ax.set_title(variant.label, loc="left", y=1.0, pad=17)
    return Drawn(title, save(page.figure, stem), task)


def _overviews(results: Results, model: str, group: str, folder: Path, end: str) -> list[Drawn]:
    """All tasks of a group and their mean as small multiples; a figure per length, moment, seed."""
    drawn: list[Drawn] = []
    cells, overall = (_rows(f, model, group) for f in (results.cells, results.overall))
    for variant in results.variants(model, group):
        here = pick(cells, variant)
        panels = [("mean", pick(overall, variant) if len(overall) else overall)]
        panels += [(t, here[here["task"] == t]) for t in dict.fromkeys(here["task"].astype(str))]
        panels = [(name, rows) for name, rows in panels if _drawable(rows)]
        if panels:
            title = ", ".join([short(group), *[variant.label] * bool(variant.label)])
            title += f"{_metric(here)} · {short(model)}"
            suffix = f"-{slug(variant.label.replace(', ', '-').replace(' ', '-'))}"
            stem = f"overview-{slug(group)}{suffix if variant.label else ''}{end}"
            looks_of = looks(results.policies)
            drawn += [
                _overview(panels, here, title, looks_of, folder / stem, memory)
                for memory in _memories(here)
            ]
    return drawn


def _overview(
    panels: Sequence[tuple[str, pd.DataFrame]],
    cells: pd.DataFrame,
    title: str,
    looks_of: Any,
    stem: Path,
    memory: Memory,
) -> Drawn:
    unit = unit_scale(cells)
    columns = min(5 if len(panels) > 8 else 4, len(panels))
    x = ByteAxis.of(pd.concat([_compressed(rows) for _, rows in panels]), memory)
    title, stem = title + _over(memory)[0], stem.with_name(stem.name + _over(memory)[1])
    drawn = [panels[0][1]] if panels[0][0] == "mean" else [rows for _, rows in panels]
    pale = _pale(drawn, memory)
    handles, labels = _legend(cells, looks_of, pale, named=True)
    silent = {name for name, rows in panels if name != "mean" and _silent(rows)}
    if silent:
        title += " (° the full cache is not above chance)"
    page = sheet(
        math.ceil(len(panels) / columns),
        columns,
        title=title,
        width=PAGE,
        panel=1.2,
        labels=labels,
        handles=handles,
        x_label=x.label,
        y_label=_score_label(unit, cells),
        left=0.48 if unit else 0.62,
        top=0.22,
        gap=(0.12 if unit else 0.4, 0.3),
        sharex=True,
        sharey=unit,
    )
    for i, (ax, (name, rows)) in enumerate(zip(page.used(len(panels)), panels, strict=True)):
        draw_panel(
            ax,
            rows,
            looks_of,
            x,
            unit=unit,
            limits=(-3.0, 103.0) if unit else _score_limits(rows, unit),
            width=page.panel_width,
            bytes_axis=False,
            pale=pale,
        )
        weight = "bold" if name == "mean" else "normal"
        ax.set_title(
            short(name, 20) + " °" * (name in silent), loc="left", fontweight=weight, y=1.0, pad=3
        )
        ax.tick_params(labelbottom=i + columns >= len(panels))
    return Drawn(title, save(page.figure, stem))


def _compressed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["policy"] != "full"]


def _pale(panels: Iterable[pd.DataFrame], memory: Memory) -> list[str]:
    """Policies to grey: with more than there are colours, all that are on no front."""
    points = [_compressed(rows).reset_index(drop=True) for rows in panels]
    policies = list(dict.fromkeys(p for part in points for p in part["policy"].astype(str)))
    if len(policies) <= MOST_COLOURS:
        return []
    best = {policy for part in points for policy in part["policy"].iloc[front_of(part, memory)]}
    return [policy for policy in policies if policy not in best]


def _silent(rows: pd.DataFrame) -> bool:
    """Whether full was run here and is not above chance."""
    return bool((rows["policy"] == "full").any()) and not bool(rows["discriminative"].all())


def _score_limits(rows: pd.DataFrame, unit: bool) -> tuple[float, float]:
    """Limits of the score axis that show every interval, at least 10 points apart."""
    values = rows[["score", "score_lo", "score_hi"]].to_numpy(dtype=np.float64)
    values = values[np.isfinite(values)] * (100.0 if unit else 1.0)
    low, high = float(values.min()), float(values.max())
    pad = max(0.05 * (high - low), (10.0 - (high - low)) / 2 if unit else 1e-6)
    low, high = low - pad, high + pad
    return (max(-3.0, low), min(103.0, high)) if unit else (low, high)


def _score_label(unit: bool, rows: pd.DataFrame) -> str:
    """What the axis of the scores is called: the metric, if they are not shown in points."""
    if unit:
        return "score (0 to 100)"
    metrics = set(rows["metric"]) if "metric" in rows else set()
    name = short(metrics.pop()) if len(metrics) == 1 else "score"
    lower = bool(len(rows)) and not rows["higher_is_better"].any()
    return name + " (lower is better)" * lower


def _legend(
    rows: pd.DataFrame, looks_of: Any, pale: Sequence[str], *, named: bool
) -> tuple[list[Any], list[str]]:
    """Handles and labels: the policies if they are named here, and what all figures show."""
    drawn = [policy for policy in looks_of if (rows["policy"] == policy).any()]
    labels = [policy for policy in drawn if named and policy not in pale]
    handles: list[Any] = [handle(looks_of[policy]) for policy in labels]
    if pale:
        count = sum(policy in pale for policy in drawn)
        handles.append(Line2D([], [], color=PALE, marker="o", ms=2.5, lw=0.6))
        labels.append(f"{count} other policies")
    if (rows["policy"] == "full").any():
        line = Line2D([], [], color=GREY, lw=0.9, ls=(0, (4, 2)))
        handles.append((Patch(color=GREY_BAND, lw=0), line))
        labels.append("full, 95% interval")
    handles.append(Line2D([], [], **FRONT))
    return handles, [*labels, "Pareto front"]
