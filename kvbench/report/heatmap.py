"""Needle in a haystack: score by depth of the needle and length of the context."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvbench.report.frames import Results, of_moment
from kvbench.report.overall import CONFIG
from kvbench.report.style import COLUMN, PAGE, house_style, save, sheet
from kvbench.report.text import short, slug
from kvbench.stats import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DEPTH = r"-d(\d{3})$"
_MOST_COLUMNS = 4


def with_depth(results: Results) -> pd.DataFrame:
    """The samples of needle tasks with their depth, in percent of the context.

    The depth is the end of the sample's id, `-d040`. A task counts only if every one of its sample
    ids ends so.

    Returns:
        Columns `model`, `task`, `length`, `policy`, `budget`, `moment`, `depth` and `score`.
    """
    columns = ["cell", "model", "task", "group", "length", *CONFIG]
    assert results.samples is not None
    cells = results.cells.loc[results.cells["status"] == "ok", columns]
    named = cells["task"].str.startswith("niah") | cells["group"].str.startswith("niah")
    samples = results.samples[["cell", "sample_id", "score"]].merge(cells[named], on="cell")
    found = samples["sample_id"].str.extract(_DEPTH, expand=False)
    has = found.notna().groupby(samples["task"]).transform("all") if len(samples) else found.notna()
    return samples[has.astype(bool)].assign(depth=found[has.astype(bool)].astype(int))


def draw_heatmaps(results: Results, folder: Path) -> list[Path]:
    """Draw depth by length for every needle task, a panel per policy and budget.

    Args:
        results: What to draw; seeds are pooled.
        folder: Where to; it exists.

    Returns:
        The files written, none where no sample carries a depth.
    """
    samples = with_depth(results)
    paths: list[Path] = []
    with house_style():
        for (model, task), part in samples.groupby(["model", "task"], sort=False):
            moments = list(dict.fromkeys(part.loc[part["policy"] != "full", "moment"]))
            for moment in moments or [""]:
                rows = part[of_moment(part, moment)]
                others = rows.loc[rows["policy"] != "full", "length"]
                if len(others):  # of a length with nothing but full there is nothing to compare
                    rows = rows[rows["length"].isin(others)]
                name = f"niah-depth-{slug(task)}"
                name += f"-{slug(moment)}" if len(moments) > 1 else ""
                name += f"-{slug(model)}" if len(results.models) > 1 else ""
                title = f"{short(task)} · {short(model)}" + (
                    f", {short(moment)}" if len(moments) > 1 else ""
                )
                paths += _heatmap(rows, title, folder / name)
    return paths


def _panels(rows: pd.DataFrame, most: int) -> list[list[tuple[str, str] | None]]:
    """Which policy and budget stands where: policies across, budgets down, full first.

    Args:
        rows: Samples with depth.
        most: Panels side by side.

    Returns:
        Lines of `(policy, budget)`, with `None` where there is nothing to show.
    """
    present = set(zip(rows["policy"], rows["budget"].astype(str), strict=True))
    policies = [p for p in dict.fromkeys(rows["policy"]) if p != "full"]
    budgets = sorted({b for p, b in present if p != "full"}, key=_budget_order)
    full = sorted(pair for pair in present if pair[0] == "full")
    if len(policies) == 1:
        flat = full + [(policies[0], b) for b in budgets]
        return [[*flat[i : i + most]] for i in range(0, len(flat), most)]
    lines: list[list[tuple[str, str] | None]] = []
    blocks = math.ceil(len(policies) / max(1, most - len(full)))
    room = math.ceil(len(policies) / max(1, blocks))
    for first in range(0, len(policies), max(1, room)):
        block = policies[first : first + room]
        for y, budget in enumerate(budgets):
            corner = [full[0] if first == 0 and y == 0 else None] if full else []
            pairs = [(p, budget) for p in block]
            lines.append([*corner, *(pair if pair in present else None for pair in pairs)])
    return lines or [[*full]]


def _budget_order(budget: str) -> tuple[bool, float]:
    """Shares of the context before numbers of tokens, each from small to large."""
    try:
        return (budget.isdigit(), float(budget))
    except ValueError:
        return (True, math.inf)


def _heatmap(rows: pd.DataFrame, title: str, stem: Path) -> list[Path]:
    lengths, depths = sorted(set(rows["length"])), sorted(set(rows["depth"]))
    counts = set(rows.groupby([*CONFIG, "depth", "length"]).size())
    field = 0.25 if len(counts) == 1 else 0.46  # inches that a score needs
    most = max(1, int(5.97 / max(0.6, field * len(lengths) + 0.08)))
    lines = _panels(rows, most)
    columns = max(len(line) for line in lines)
    unit = bool(rows["score"].between(0, 1).all())
    scale = 100.0 if unit else 1.0
    low, top = (0.0, 100.0) if unit else (float(rows["score"].min()), float(rows["score"].max()))
    names = [[pair and _name(pair, 5.9 / columns) for pair in line] for line in lines]
    tall = max(name.count("\n") + 1 for line in names for name in line if name)
    page = sheet(
        len(lines),
        columns,
        width=PAGE if columns > 2 else COLUMN,
        panel=max(1.0 / len(lines), 0.13 * len(depths)),
        labels=[],
        handles=[],
        x_label="context length, tokens",
        y_label="needle depth, %",
        top=0.2 + 0.12 * tall,
        gap=(0.08, 0.1 + 0.12 * tall),
        right=0.55,
        sharex=True,
        sharey=True,
    )
    image: Any = None
    for y, x in np.ndindex(len(lines), columns):
        ax = page.axes[y, x]
        pair = lines[y][x] if x < len(lines[y]) else None
        if pair is None:
            ax.set_axis_off()
            continue
        part = rows[(rows["policy"] == pair[0]) & (rows["budget"].astype(str) == pair[1])]
        both = part.groupby(["depth", "length"])["score"].agg(["mean", "size"])
        mean = both["mean"].unstack().reindex(index=depths, columns=lengths)
        n = both["size"].unstack().reindex(index=depths, columns=lengths)
        values = np.ma.masked_invalid(scale * mean.to_numpy(dtype=np.float64))
        image = ax.imshow(values, cmap="cividis", vmin=low, vmax=top, aspect="auto")
        ax.set_title(names[y][x], loc="left", fontsize=7, y=1.0, pad=2)
        ax.spines[:].set_visible(False)
        ax.set_xticks(range(len(lengths)), [_tokens(v) for v in lengths], fontsize=7)
        step = math.ceil(len(depths) / 6)
        ax.set_yticks(range(0, len(depths), step), [str(d) for d in depths[::step]], fontsize=7)
        last = y + 1 == len(lines) or x >= len(lines[y + 1]) or lines[y + 1][x] is None
        first = x == 0 or lines[y][x - 1] is None
        ax.tick_params(length=0, labelbottom=last, labelleft=first)
        _annotate(ax, values, n.to_numpy(dtype=np.float64) if len(counts) > 1 else None, low, top)
    many = ", samples in brackets" if len(counts) > 1 else f", n = {min(counts)} per field"
    width, height = page.figure.get_size_inches()
    page.figure.text(
        0.05 / width, 1 - 0.05 / height,
        f"{title}: score{' (0 to 100)' if unit else ''}{many}", ha="left", va="top",
    )  # fmt: skip
    box = page.axes[0, 0].get_position()
    place = (1 - 0.45 / width, box.y0, 0.1 / width, box.height)
    bar = page.figure.colorbar(image, cax=page.figure.add_axes(place))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)
    return save(page.figure, stem)


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _name(pair: tuple[str, str], width: float) -> str:
    """A panel's title, broken at colons and commas so that it fits `width` inches at 7 points."""
    if pair[0] == "full":
        return "full"
    most = int(width / 0.06)
    lines = [""]
    for part in re.split(r"(?<=[:,])", f"{short(pair[0], 60)}, {pair[1]}"):
        if lines[-1] and len(lines[-1]) + len(part) > most:
            lines.append("")
        lines[-1] += short(part, most).lstrip() if not lines[-1] else part
    return "\n".join(lines)


def _annotate(
    ax: Axes, values: np.ma.MaskedArray[Any, Any], n: Floats | None, low: float, top: float
) -> None:
    """Write the score into each field, and the number of samples where it differs."""
    for (row, column), value in np.ndenumerate(np.ma.filled(values, np.nan)):
        if np.isnan(value):
            continue
        dark = value < low + 0.55 * (top - low)
        count = f" ({int(n[row, column])})" if n is not None else ""
        ax.text(
            column, row, f"{value:.0f}{count}", ha="center", va="center",
            fontsize=6.5, color="white" if dark else "black",
        )  # fmt: skip
