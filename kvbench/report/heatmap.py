"""Needle in a haystack: score by depth of the needle and length of the context."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvbench.report.frames import Results, budget_order, extras, of_moment
from kvbench.report.overall import CONFIG
from kvbench.report.style import COLUMN, PAGE, Drawn, house_style, save, sheet
from kvbench.report.text import counted, short, slug
from kvbench.stats import Floats

_QUESTION = ["sample_id", "question_id"]
_MOST_MAPS = 60
"""Maps in one figure. A page holds no more, and a figure's time grows with the square of them."""
_FIELD = ["policy", "budget", "depth", "length"]
"""What a field of a map is about; seeds are pooled."""


def with_depth(results: Results) -> pd.DataFrame:
    """The samples whose `extra` has a depth, in percent of the context.

    A task counts only if every one of its samples has one.

    Returns:
        Columns `cell`, `sample_id`, `question_id`, `score`, `depth`, `model`, `task`, `metric`,
        `length`, `policy`, `budget` and `moment`.
    """
    assert results.samples is not None
    columns = ["cell", "model", "task", "metric", "length", *CONFIG]
    cells = results.cells.loc[results.cells["status"] == "ok", columns]
    found = []
    for _, part in cells.groupby("task", sort=False):
        samples = results.samples.of(part["cell"])[["cell", *_QUESTION, "extra", "score"]]
        depths = {text: _depth(extra) for text, extra in extras(samples).items()}
        if depths and not any(map(math.isnan, depths.values())):
            depth = samples["extra"].map(depths).astype(float)
            found.append(samples.drop(columns="extra").assign(depth=depth))
    if not found:
        return pd.DataFrame(columns=["cell", *_QUESTION, "score", "depth", *columns[1:]])
    return pd.concat(found).sort_index().astype({"cell": str}).merge(cells, on="cell")


def _depth(extra: Mapping[str, Any]) -> float:
    depth = extra.get("depth")
    if isinstance(depth, bool) or not isinstance(depth, (int, float)):
        return math.nan
    return float(depth)


def draw_heatmaps(results: Results, folder: Path) -> list[Drawn]:
    """Draw depth by length for every task whose samples have a depth.

    Each figure has a panel per policy and budget.

    Args:
        results: What to draw; seeds are pooled.
        folder: Where to; it exists.

    Returns:
        The figures; none if no task has depths.
    """
    samples = with_depth(results)
    drawn: list[Drawn] = []
    with house_style():
        for (model, task), part in samples.groupby(["model", "task"], sort=False):
            moments = list(dict.fromkeys(part.loc[part["policy"] != "full", "moment"]))
            for moment in moments or [""]:
                rows = part[of_moment(part, moment)]
                others = rows.loc[rows["policy"] != "full", "length"]
                if len(others):  # of a length with nothing but full there is nothing to compare
                    rows = rows[rows["length"].isin(others)]
                name = f"depth-{slug(task)}"
                name += f"-{slug(moment)}" if len(moments) > 1 else ""
                name += f"-{slug(model)}" if len(results.models) > 1 else ""
                metric = ", ".join(dict.fromkeys(rows["metric"].astype(str)))
                title = f"{short(task)}, {short(metric)} · {short(model)}"
                title += f", {short(moment)}" if len(moments) > 1 else ""
                for where, some in _parts(rows):
                    end = f", budget {where}" if where else ""
                    stem = f"{name}-{slug(where)}" if where else name
                    drawn.append(_heatmap(some, title + end, folder / stem))
    return drawn


def _parts(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of one figure, or of a figure per budget if there are more maps than it can hold.

    Yields:
        The budget, empty if there is one figure, and the rows with those of full.
    """
    full = rows["policy"] == "full"
    if len(rows[["policy", "budget"]].drop_duplicates()) <= _MOST_MAPS:
        yield "", rows
        return
    for budget in sorted(set(rows.loc[~full, "budget"].astype(str)), key=budget_order):
        yield budget, rows[full | (rows["budget"] == budget)]


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
    budgets = sorted({b for p, b in present if p != "full"}, key=budget_order)
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


def _heatmap(rows: pd.DataFrame, title: str, stem: Path) -> Drawn:
    lengths, depths = sorted(set(rows["length"])), sorted(set(rows["depth"]))
    # A repeat of a question is not another question.
    asked = rows.drop_duplicates(["cell", *_QUESTION])
    counts = set(asked.groupby(_FIELD).size().tolist())
    means = rows.groupby(_FIELD)["score"].mean().to_numpy(np.float64)
    field = 0.25 if len(counts) == 1 else 0.46  # inches that a score needs
    most = max(1, int(5.97 / max(0.6, field * len(lengths) + 0.08)))
    lines = _panels(rows, most)
    columns = max(len(line) for line in lines)
    unit = bool(rows["score"].between(0, 1).all())
    scale = 100.0 if unit else 1.0
    low, top = (0.0, 100.0) if unit else (float(means.min()), float(means.max()))
    names = [[pair and _name(pair, 5.9 / columns) for pair in line] for line in lines]
    tall = max(name.count("\n") + 1 for line in names for name in line if name)
    n = (
        f"n = {counted(min(counts), 'question')} per cell"
        if len(counts) == 1
        else "questions per cell in brackets"
    )
    title += f": score{' (0 to 100)' * unit}, {n}"
    whole, single = _grids(rows, "mean"), _grids(asked, "count")
    page = sheet(
        len(lines),
        columns,
        title=title,
        width=PAGE if columns > 2 else COLUMN,
        panel=max(1.0 / len(lines), 0.13 * len(depths)),
        x_label="context length, tokens",
        y_label="depth in the context, %",
        top=0.05 + 0.12 * tall,
        gap=(0.08, 0.1 + 0.12 * tall),
        right=0.5,
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
        mean, count = (
            grid.reindex(index=depths, columns=lengths).to_numpy(np.float64)
            for grid in (whole[pair], single[pair])
        )
        values = np.ma.masked_invalid(scale * mean)
        image = ax.imshow(values, cmap="cividis", vmin=low, vmax=top, aspect="auto")
        ax.set_title(names[y][x], loc="left", fontsize=7, y=1.0, pad=2)
        ax.spines[:].set_visible(False)
        ax.set_xticks(range(len(lengths)), [_tokens(v) for v in lengths], fontsize=7)
        step = math.ceil(len(depths) / 6)
        ax.set_yticks(range(0, len(depths), step), [f"{d:g}" for d in depths[::step]], fontsize=7)
        last = y + 1 == len(lines) or x >= len(lines[y + 1]) or lines[y + 1][x] is None
        first = x == 0 or lines[y][x - 1] is None
        ax.tick_params(length=0, labelbottom=last, labelleft=first)
        _annotate(ax, values, count if len(counts) > 1 else None, low, top)
    page.colour_bar(image, scale * means)
    return Drawn(title, save(page.figure, stem))


def _grids(
    rows: pd.DataFrame, how: Literal["mean", "count"]
) -> dict[tuple[str, str], pd.DataFrame]:
    """Scores by depth and length, by policy and budget: their mean, or how many they are."""
    return {
        (str(policy), str(budget)): part.pivot_table(
            values="score", index="depth", columns="length", aggfunc=how
        )
        for (policy, budget), part in rows.groupby(["policy", "budget"], sort=False)
    }


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
