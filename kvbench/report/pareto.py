"""A panel of score against KV bytes: points, intervals, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from kvbench.report.front import HELD, Memory, front
from kvbench.report.numbers import size
from kvbench.report.style import FRONT, GREY, GREY_BAND, PALE, marked
from kvbench.report.text import short
from kvbench.stats import Floats

_LOG_FROM = 4.0  # budgets that span more than this get a logarithmic axis
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_LANES = (0, 1, -1, 2, -2, 3, -3, 4, -4)  # of error bars, in the order in which they are filled
_LANE = 4.0  # points between two of them
_NEAR = 2.5  # points between markers that cover each other
_NEST = 0.3  # a marker grows by this much for each marker drawn over it
_LABEL_STEPS = (4, 9, 15, 22, 30, 40, 52)  # points between a label and what it names
_LABEL_SIDES = ((-1, 1), (1, 1), (1, -1), (-1, -1))  # left and above first
_LEADER_FROM = 9
Look = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class ByteAxis:
    """The x axis of a panel, in shares of the full cache's bytes.

    Attributes:
        log: Whether it is logarithmic.
        low: Left end.
        high: Right end.
        memory: Which bytes it counts.
    """

    log: bool
    low: float
    high: float
    memory: Memory = HELD

    @classmethod
    def of(cls, rows: pd.DataFrame, memory: Memory = HELD) -> ByteAxis:
        """The axis that shows all of these cells."""
        x = rows[memory.share].to_numpy(dtype=np.float64)
        log = bool(x.min() > 0 and x.max() / x.min() > _LOG_FROM * 1.02)
        u = np.log10(x) if log else x
        span = float(u.max() - u.min())
        pad = 0.08 * span
        if span < (0.01 if log else 0.02 * float(u.max())):  # one budget, but for a policy's extras
            pad = 0.15 if log else 0.15 * float(u.max())
        low, high = float(u.min()) - pad, float(u.max()) + pad
        return cls(log, 10**low, 10**high, memory) if log else cls(log, low, high, memory)

    @property
    def label(self) -> str:
        """What the axis is called."""
        return self.memory.label + ", log scale" * self.log


def draw_panel(
    ax: Axes,
    rows: pd.DataFrame,
    looks_of: Look,
    x: ByteAxis,
    *,
    unit: bool,
    limits: tuple[float, float],
    width: float,
    bytes_axis: bool,
    pale: Sequence[str] = (),
    labelled: bool = False,
) -> None:
    """Draw score against the share of the full cache's bytes, with 95% intervals.

    Every point stands exactly at the bytes that the axis counts. Where error bars would cover each
    other they are set side by side, and a marker that others cover is drawn larger than those.

    Args:
        ax: Where to draw.
        rows: Cells or group means of one panel, full among them if it was run.
        looks_of: Colour and marker by policy.
        x: The x axis.
        unit: Whether to show points, 0 to 100.
        limits: Limits of the score axis, as shown.
        width: Width of the panel in inches: so many tick labels fit.
        bytes_axis: Whether to write the bytes along the top.
        pale: Policies that are drawn in grey, without intervals.
        labelled: Whether to write the names of the policies on the front beside their points.
    """
    scale = 100.0 if unit else 1.0
    full = rows[rows["policy"] == "full"]
    points = rows[rows["policy"] != "full"].reset_index(drop=True)
    ax.set_ylim(*limits)
    ax.set_xscale("log" if x.log else "linear")
    ax.set_xlim(x.low, x.high)
    if len(full):
        mark = full.iloc[-1]
        bounds = np.clip([scale * mark["score_lo"], scale * mark["score_hi"]], *limits)
        ax.axhspan(float(bounds[0]), float(bounds[1]), color=GREY_BAND, lw=0, zorder=0)
        ax.axhline(scale * mark["score"], color=GREY, lw=0.9, ls=(0, (4, 2)), zorder=1)
    score = scale * points["score"].to_numpy(dtype=np.float64)
    share = points[x.memory.share].to_numpy(dtype=np.float64)
    best = front_of(points, x.memory)
    ax.step(
        [*share[best], x.high], [*score[best], score[best[-1]]], where="post", zorder=2, **FRONT
    )
    ends = (scale * points[end].to_numpy(dtype=np.float64) for end in ("score_lo", "score_hi"))
    low, high = (np.clip(end, *limits) for end in ends)
    _draw_policies(ax, points["policy"], share, score, low, high, looks_of, pale)
    if labelled:
        coloured = ~points["policy"].isin(list(pale)).to_numpy()
        _label_front(ax, points, best, coloured, share, score, looks_of)
    if unit:
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
    _ticks(ax, x, points, width, bytes_axis)
    ax.grid(axis="y", color="#dddddd", lw=0.4, zorder=-1)
    ax.set_axisbelow(True)


def front_of(points: pd.DataFrame, memory: Memory = HELD) -> npt.NDArray[np.intp]:
    """Positions of the Pareto-optimal rows of a panel, from the cheapest on."""
    score = points["score"].to_numpy(dtype=np.float64)
    # Where a lower score is better, the front runs along the lowest points.
    worth = score if points["higher_is_better"].iloc[0] else -score
    best = np.flatnonzero(front(points[memory.bytes], worth))
    share = points[memory.share].to_numpy(dtype=np.float64)
    return best[np.argsort(share[best], kind="stable")]


def _draw_policies(
    ax: Axes,
    names: pd.Series[str],
    share: Floats,
    score: Floats,
    low: Floats,
    high: Floats,
    looks_of: Look,
    pale: Sequence[str],
) -> None:
    """Draw the points and error bars of all policies, in the order of the legend."""
    drawn = [policy for policy in looks_of if (names == policy).any()]
    turns = {policy: float(i) for i, policy in enumerate(drawn) if policy not in pale}
    order = np.asarray(names.map(turns), dtype=np.float64)
    point = ax.figure.dpi / 72.0  # in pixels
    pixels = ax.transData.transform(np.column_stack([share, score]))
    sizes = _nested_sizes(pixels / point, order)
    aside = _bars_aside(pixels[:, 0] / point, order, low, high)
    pixels[:, 0] += aside * point
    places = np.where(aside == 0, share, ax.transData.inverted().transform(pixels)[:, 0])
    for policy in drawn:
        mine = np.flatnonzero((names == policy).to_numpy())
        mine = mine[np.argsort(share[mine], kind="stable")]
        if policy in pale:
            ax.plot(share[mine], score[mine], color=PALE, marker="o", ms=2.5, lw=0.6, zorder=1.5)
            continue
        look = marked(looks_of[policy])
        bar: dict[str, Any] = {"color": look["color"], "lw": 0.7, "zorder": 2.5}
        ax.plot(share[mine], score[mine], color=look["color"], lw=0.8, alpha=0.45, zorder=2)
        ax.vlines(places[mine], low[mine], high[mine], **bar)
        tied = mine[aside[mine] != 0]
        if len(tied):  # by a line to their points
            ax.hlines(score[tied], share[tied], places[tied], **bar)
        for i in mine:
            marker = {**look, "ms": look["ms"] * sizes[i]}
            ax.plot(share[i], score[i], ls="none", zorder=3, **marker)


def _bars_aside(x: Floats, order: Floats, low: Floats, high: Floats) -> Floats:
    """How far error bars stand from their points, so that they do not cover each other.

    Bars at nearly the same bytes are packed into lanes, the middle one first: bars of one lane do
    not overlap.

    Args:
        x: Where the points are, in typographic points.
        order: In which order they choose a lane; NaN for a point without a bar.
        low, high: Ends of the bars.

    Returns:
        Distances in typographic points.
    """
    aside = np.zeros(len(x))
    along = np.argsort(x, kind="stable")
    groups = np.split(along, np.flatnonzero(np.diff(x[along]) > _LANE) + 1)
    gap = min((x[b[0]] - x[a[-1]] for a, b in pairwise(groups)), default=math.inf)
    for group in groups:
        lanes: dict[int, list[int]] = {}
        for i in sorted((int(i) for i in group if order[i] >= 0), key=lambda i: order[i]):
            free = (
                lane
                for lane in _LANES
                if all(low[i] > high[k] or high[i] < low[k] for k in lanes.get(lane, []))
            )
            lanes.setdefault(next(free, 0), []).append(i)
        step = min(_LANE, 0.45 * gap / (1 + max(map(abs, lanes), default=0)))
        for lane, members in lanes.items():
            aside[members] = lane * step
    return aside


def _nested_sizes(at: Floats, order: Floats) -> Floats:
    """Sizes that let every one of several coinciding markers show, later ones inside earlier.

    Args:
        at: `[n, 2]`, where the markers are, in typographic points.
        order: In which order they are drawn; NaN for those that do not count.
    """
    near = (np.abs(at[:, None] - at) < _NEAR).all(-1)
    return np.asarray(1 + _NEST * (near & (order > order[:, None])).sum(1), dtype=np.float64)


def _label_front(
    ax: Axes,
    points: pd.DataFrame,
    best: npt.NDArray[np.intp],
    coloured: npt.NDArray[np.bool_],
    share: Floats,
    score: Floats,
    looks_of: Look,
) -> None:
    """Write each policy's name beside its cheapest point on the front, clear of other names.

    Nothing lies above and to the left of a front, so that side is tried first.
    """
    canvas = ax.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    pixels = ax.transData.transform(np.column_stack([share, score]))
    taken = [Bbox.from_bounds(px - 4, py - 4, 8, 8).padded(5) for px, py in pixels[coloured]]
    inside = ax.get_window_extent(renderer).padded(-1)
    cheapest: dict[str, int] = {}
    for i in best:
        cheapest.setdefault(str(points["policy"][i]), int(i))
    for policy, i in cheapest.items():
        colour = tuple(0.75 * part for part in to_rgb(looks_of[policy][0]))  # legible as text
        text = ax.annotate(
            short(policy, 30),
            (share[i], score[i]),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=7,
            color=colour,
            zorder=5,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )
        for step, (across, up) in product(_LABEL_STEPS, _LABEL_SIDES):
            text.set_horizontalalignment("right" if across < 0 else "left")
            text.set_verticalalignment("bottom" if up > 0 else "top")
            text.set_position((across * 3, up * step))
            box = text.get_window_extent(renderer)
            clear = not any(box.overlaps(other) for other in taken)
            if clear and inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1):
                taken.append(box)
                if step > _LEADER_FROM:
                    near = (across * 3, up * (step + 1))
                    ax.annotate(
                        "", (share[i], score[i]), near, textcoords="offset points",
                        arrowprops={"arrowstyle": "-", "lw": 0.5, "color": colour},
                    )  # fmt: skip
                break
        else:  # no room: better a name on something else than no name
            text.set_position((0, _LABEL_STEPS[0]))


def _ticks(ax: Axes, x: ByteAxis, points: pd.DataFrame, width: float, bytes_axis: bool) -> None:
    """Percentages along the bottom and, if asked, the bytes of the same places along the top."""
    if x.log:
        ticks = [t for t in _TICKS if x.low <= t <= x.high]
        if len(ticks) < 2:
            ticks = [float(t) for t in np.geomspace(x.low, x.high, 4)[1:3]]
    else:
        found = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(100 * x.low, 100 * x.high)
        ticks = [float(t) / 100 for t in found if x.low <= t / 100 <= x.high]
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
