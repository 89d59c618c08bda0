"""The Pareto front of score against KV bytes held, and the panel that shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench.report.style import FRONT, GREY, GREY_BAND, MARKER_SIZE
from kvbench.report.text import size
from kvbench.stats import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOG_FROM = 4.0  # budgets that span more than this get a logarithmic axis
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
Look = Mapping[str, tuple[str, str]]


def front(cost: npt.ArrayLike, value: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which points are Pareto-optimal: no other is cheaper and as good, or better and as cheap.

    Points that tie in both are kept together; a point with a NaN is never optimal.

    Args:
        cost: `[n]`, less is better.
        value: `[n]`, more is better.

    Returns:
        `[n]`, in O(n log n).
    """
    costs, values = np.asarray(cost, dtype=np.float64), np.asarray(value, dtype=np.float64)
    best = np.zeros(len(costs), dtype=np.bool_)
    valid = np.flatnonzero(~(np.isnan(costs) | np.isnan(values)))
    order = valid[np.lexsort((-values[valid], costs[valid]))]
    last = -1  # the last optimal point: the dearest and most valuable so far
    for i in order:
        tie = values[i] == values[last] and costs[i] == costs[last]
        if last < 0 or tie or values[i] > values[last]:
            best[i] = True
            last = i
    return best


def draw_panel(
    ax: Axes,
    rows: pd.DataFrame,
    looks_of: Look,
    *,
    unit: bool,
    limits: tuple[float, float],
    width: float,
    bytes_axis: bool,
) -> None:
    """Draw score against the share of the full cache's bytes, with 95% intervals.

    Policies that hold the same bytes are set side by side, in the order of the legend, by a small
    shift; the step line joins the Pareto-optimal points where they are without it.

    Args:
        ax: Where to draw.
        rows: Cells or group means of one panel, full among them if it was run.
        looks_of: Colour and marker by policy.
        unit: Whether to show points, 0 to 100.
        limits: Limits of the score axis, as shown.
        width: Width of the panel in inches: so many tick labels fit.
        bytes_axis: Whether to write the bytes along the top.
    """
    from matplotlib.ticker import MaxNLocator

    scale = 100.0 if unit else 1.0
    full = rows[rows["policy"] == "full"]
    points = rows[rows["policy"] != "full"]
    log = _use_log(points["share"])
    if len(full):
        mark = full.iloc[-1]
        bounds = np.clip([scale * mark["score_lo"], scale * mark["score_hi"]], *limits)
        ax.axhspan(float(bounds[0]), float(bounds[1]), color=GREY_BAND, lw=0, zorder=0)
        ax.axhline(scale * mark["score"], color=GREY, lw=0.9, ls=(0, (4, 2)), zorder=1)
    place, edges = _places(points, list(looks_of), log)
    score = scale * points["score"].to_numpy(dtype=np.float64)
    # Fewer points are worth more where a lower score is better.
    worth = score if points["higher_is_better"].iloc[0] else -score
    best = np.flatnonzero(front(points["kv_bytes_live"], worth))
    share = points["share"].to_numpy(dtype=np.float64)
    best = best[np.argsort(share[best], kind="stable")]
    ax.step(
        [*share[best], edges[1]], [*score[best], score[best[-1]]], where="post",
        zorder=2, **FRONT,
    )  # fmt: skip
    for policy, (colour, marker) in looks_of.items():
        mine = np.flatnonzero((points["policy"] == policy).to_numpy())
        if not len(mine):
            continue
        mine = mine[np.argsort(place[mine])]
        part = points.iloc[mine]
        low, high = (
            np.clip(scale * part[c].to_numpy(dtype=np.float64), *limits)
            for c in ("score_lo", "score_hi")
        )
        shown = score[mine]
        ax.plot(place[mine], shown, color=colour, lw=0.8, alpha=0.45, zorder=2)
        bars = np.maximum(0.0, np.vstack([shown - low, high - shown]))
        ax.errorbar(
            place[mine], shown, yerr=bars, color=colour, ecolor=colour, elinewidth=0.7, ls="none",
            marker=marker, ms=MARKER_SIZE.get(marker, 4.5), mec="white", mew=0.4, zorder=3,
        )  # fmt: skip
    ax.set_ylim(*limits)
    if unit:
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.set_xscale("log" if log else "linear")
    ax.set_xlim(*edges)
    _ticks(ax, edges, log, points, width, bytes_axis)
    ax.grid(axis="y", color="#dddddd", lw=0.4, zorder=-1)
    ax.set_axisbelow(True)


def _use_log(share: pd.Series[float]) -> bool:
    return bool(share.min() > 0 and share.max() / share.min() > _LOG_FROM * 1.02)


def _places(
    points: pd.DataFrame, policies: Sequence[str], log: bool
) -> tuple[Floats, tuple[float, float]]:
    """Where to draw the points on the x axis and its two ends, in shares of full."""
    share = points["share"].to_numpy(dtype=np.float64)
    u = np.log10(share) if log else share
    span = float(u.max() - u.min())
    alone = span < (0.01 if log else 0.02 * float(u.max()))  # one budget, but for a policy's extras
    if alone:
        span = 0.3 if log else 0.3 * float(u.max())
    here = [p for p in policies if (points["policy"] == p).any()]
    groups = np.unique(np.round(u / span, 2)) * span
    gap = float(np.diff(groups).min()) if len(groups) > 1 else span
    step = min(0.022 * span, 0.5 * gap / max(1, len(here)))
    shift = {p: (i - (len(here) - 1) / 2) * step for i, p in enumerate(here)}
    u = u + points["policy"].map(shift).to_numpy(dtype=np.float64)
    pad = (0.5 if alone else 0.06) * span
    low, high = float(u.min()) - pad, float(u.max()) + pad
    if log:
        return np.power(10.0, u), (10**low, 10**high)
    return u, (low, high)


def _ticks(
    ax: Axes,
    edges: tuple[float, float],
    log: bool,
    points: pd.DataFrame,
    width: float,
    bytes_axis: bool,
) -> None:
    """Percentages along the bottom and, if asked, the bytes of the same places along the top."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    if log:
        ticks = [t for t in _TICKS if edges[0] <= t <= edges[1]]
        if len(ticks) < 2:
            ticks = [float(t) for t in np.geomspace(*edges, 4)[1:3]]
    else:
        found = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(100 * edges[0], 100 * edges[1])
        ticks = [float(t) / 100 for t in found if edges[0] <= t / 100 <= edges[1]]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [f"{100 * t:.3g}" for t in ticks])
    if not bytes_axis:
        return
    whole = float(points["kv_bytes_full"].mean())
    top = ax.secondary_xaxis("top")
    top.xaxis.set_minor_locator(NullLocator())
    every = math.ceil(len(ticks) * 0.6 / width)
    top.set_xticks(ticks[::every], [size(t * whole) for t in ticks[::every]])
    top.spines["top"].set_visible(True)
    top.tick_params(labelsize=7)
