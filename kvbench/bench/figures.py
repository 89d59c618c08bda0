"""The figures of a benchmark: what changes with context, batch, answer and budget."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvbench.budget import Budget
from kvbench.report.style import handle, house_style, looks, marked, save, sheet

_PANELS = {
    "ttft_s": ("time to first token, ms", 1e3),
    "step_s": ("decode step, ms", 1e3),
    "tokens_per_s": ("tokens per second", 1.0),
    "kv_bytes_live": ("live KV, MiB", 1 / 2**20),
}
_AXES = {
    "context": "tokens of context",
    "batch": "sequences side by side",
    "generate": "decode steps",
    "share": "share of the cache that is kept",
}


def draw_bench(summary: pd.DataFrame, model: str, folder: Path) -> list[Path]:
    """Draw a figure for every axis that has more than one value.

    On the axes of sizes, a line is a policy at one budget; on that of budgets, a policy.

    Args:
        summary: As `kvbench.bench.compare.summarize` returns it.
        model: The model as the user named it.
        folder: Where to; it exists.

    Returns:
        The files written.
    """
    frame = summary[summary["error"] == ""].copy()
    frame["share"] = [
        Budget.parse(str(b)).per_head(int(t)) / int(t)
        for b, t in zip(frame["budget"], frame["context"], strict=True)
    ]
    paths: list[Path] = []
    with house_style():
        for axis in _AXES:
            others = [a for a in ("context", "batch", "generate") if a != axis]
            part = frame
            for name in others:  # one value of the others: the largest
                part = part[part[name] == part[name].max()]
            if part[axis].nunique() > 1:
                paths += _figure(part, axis, others, model, folder / f"bench-{axis}")
    return paths


def _figure(part: pd.DataFrame, axis: str, others: list[str], model: str, stem: Path) -> list[Path]:
    part = part.assign(line=part["policy"])
    if axis != "share" and part.loc[part["policy"] != "full", "budget"].nunique() > 1:
        kept = part["policy"] + " " + part["budget"]
        part["line"] = kept.where(part["policy"] != "full", "full")
    names = list(dict.fromkeys(part["line"]))
    look = looks(names)
    fixed = ", ".join(f"{_AXES[name]}: {int(part[name].iloc[0])}" for name in others)
    page = sheet(
        1,
        len(_PANELS),
        title=f"{model}, medians over repeats; {fixed}",
        width=7.0,
        panel=1.5,
        x_label=_AXES[axis],
        y_label="",
        labels=names,
        handles=[handle(look[name]) for name in names],
        left=0.42,
        top=0.24,
        gap=(0.42, 0.3),
    )
    for axes, (column, (title, scale)) in zip(page.axes[0], _PANELS.items(), strict=True):
        axes.set_title(title, fontsize=7)
        for name in names:
            line = part[part["line"] == name].sort_values(axis)
            axes.plot(line[axis], line[column] * scale, **marked(look[name]))
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted(set(part[axis])))
        if axis != "share" and part[axis].max() > 8 * part[axis].min():
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(part[axis])), labels=sorted(set(part[axis])))
            axes.minorticks_off()
    return save(page.figure, stem)
