"""Drawing of panels of score vs KV bytes: points, intervals and the Pareto front."""

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
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from kvbench.report.front import HELD, MemoryMetric, front_of
from kvbench.stats import Floats
from kvbench.tables.numbers import size
from kvbench.tables.plot_style import FRONT, GREY, GREY_BAND, PALE, marker_options
from kvbench.tables.text import short

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


_LOG_FROM = 4.0  # a larger ratio of budgets gets a logarithmic axis
_BYTES_WIDTH = 0.66  # inches of a tick label such as 1.88 MiB
_LANES = (0, 1, -1, 2, -2, 3, -3, 4, -4)  # horizontal lanes of error bars, in the order of use
_LANE = 4.0  # points between two lanes
_NEAR = 2.5  # points within which markers overlap
_NEST = 0.3  # growth of a marker per marker drawn over it
_LABEL_STEPS = (4, 9, 15, 22, 30, 40, 52)  # points between a label and its marker
_LABEL_SIDES = ((-1, 1), (1, 1), (1, -1), (-1, -1))  # left and above first
_LEADER_FROM = 9
MarkerStyles = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class ByteAxis:
    """The x axis of a panel: shares of the full cache's bytes, bytes, or tokens per KV head.

    Attributes:
        log: Whether the axis is logarithmic.
        low: Left end.
        high: Right end.
        memory: Memory metric.
    """

    log: bool
    low: float
    high: float
    memory: MemoryMetric = HELD

    @classmethod
    def of(cls, cell_rows: pd.DataFrame, memory: MemoryMetric = HELD) -> ByteAxis:
        """Return an axis that covers all cells."""
        shares = cell_rows[memory.share].to_numpy(dtype=np.float64)
        is_log = bool(shares.min() > 0 and shares.max() / shares.min() > _LOG_FROM * 1.02)
        positions = np.log10(shares) if is_log else shares
        span = float(positions.max() - positions.min())
        padding = 0.08 * span
        if span < (0.01 if is_log else 0.02 * float(positions.max())):  # one budget plus per-entry state
            padding = 0.15 if is_log else 0.15 * float(positions.max())
        left_end, right_end = float(positions.min()) - padding, float(positions.max()) + padding
        return cls(is_log, 10**left_end, 10**right_end, memory) if is_log else cls(is_log, left_end, right_end, memory)

    @property
    def label(self) -> str:
        """Axis label."""
        unit_suffix = f", {self.unit[0]}" if self.memory.unit == "bytes" else ""
        return self.memory.label + unit_suffix + ", log scale" * self.log

    @property
    def unit(self) -> tuple[str, float]:
        """Name and size of the unit of the tick labels."""
        if self.memory.unit != "bytes":
            return self.memory.unit, 0.01 if self.memory.unit == "%" else 1.0
        return next((name, float(size)) for name, size in _UNITS.items() if self.high >= size or size == 1)


def draw_panel(
    ax: Axes,
    cell_rows: pd.DataFrame,
    policy_styles: MarkerStyles,
    byte_axis: ByteAxis,
    *,
    unit_scaled: bool,
    score_limits: tuple[float, float],
    log_scores: bool = False,
    panel_width: float,
    bytes_axis: bool,
    pale_policies: Sequence[str] = (),
    labelled: bool = False,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Draw score vs share of the full cache's bytes, with 95% intervals.

    Points are at their exact bytes. Overlapping error bars are drawn side by side, and a marker behind others is drawn
    larger.

    Args:
        ax: Axes to draw on.
        cell_rows: Cells or group means of one panel, including full if it was run.
        policy_styles: Colour and marker by policy.
        byte_axis: The x axis.
        unit_scaled: Whether to show points, 0 to 100.
        score_limits: Limits of the score axis, in the unit shown.
        log_scores: Whether the score axis is logarithmic.
        panel_width: Width of the panel in inches, which limits the number of tick labels.
        bytes_axis: Whether to write the bytes along the top.
        pale_policies: Policies drawn in grey, without intervals.
        labelled: Whether to write the names of the policies on the front next to their points.
        labels: Names to show for policies.
    """
    score_scale = 100.0 if unit_scaled else 1.0
    full_rows = cell_rows[cell_rows["policy"] == "full"]
    points = cell_rows[cell_rows["policy"] != "full"].reset_index(drop=True)
    ax.set_yscale("log" if log_scores else "linear")
    ax.set_ylim(*score_limits)
    ax.set_xscale("log" if byte_axis.log else "linear")
    ax.set_xlim(byte_axis.low, byte_axis.high)
    if len(full_rows):
        full_row = full_rows.iloc[-1]
        full_bounds = np.clip([score_scale * full_row["score_lo"], score_scale * full_row["score_hi"]], *score_limits)
        ax.axhspan(float(full_bounds[0]), float(full_bounds[1]), color=GREY_BAND, lw=0, zorder=0)
        full_score = float(np.clip(score_scale * full_row["score"], *score_limits))
        ax.axhline(full_score, color=GREY, lw=0.9, ls=(0, (4, 2)), zorder=1)
    scores = score_scale * points["score"].to_numpy(dtype=np.float64)
    shares = points[byte_axis.memory.share].to_numpy(dtype=np.float64)
    front_indices = front_of(points, byte_axis.memory)
    if len(front_indices):
        ax.step(
            [*shares[front_indices], byte_axis.high],
            [*scores[front_indices], scores[front_indices[-1]]],
            where="post",
            zorder=2,
            **FRONT,
        )
    interval_ends = (score_scale * points[bound].to_numpy(dtype=np.float64) for bound in ("score_lo", "score_hi"))
    lower_ends, upper_ends = (np.clip(bound, *score_limits) for bound in interval_ends)
    _draw_policies(ax, points["policy"], shares, scores, lower_ends, upper_ends, policy_styles, pale_policies)
    if labelled:
        is_coloured = ~points["policy"].isin(list(pale_policies)).to_numpy()
        _label_front(ax, points, front_indices, is_coloured, shares, scores, policy_styles, labels or {})
    if log_scores:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda score, _: f"{score:g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    if unit_scaled:
        ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
    _ticks(ax, byte_axis, points, panel_width, bytes_axis)
    ax.grid(axis="y", color="#dddddd", lw=0.4, zorder=-1)
    ax.set_axisbelow(True)


def _draw_policies(
    ax: Axes,
    policy_names: pd.Series[str],
    shares: Floats,
    scores: Floats,
    lower_ends: Floats,
    upper_ends: Floats,
    policy_styles: MarkerStyles,
    pale_policies: Sequence[str],
) -> None:
    """Draw the points and error bars of all policies, in the order of the legend."""
    drawn_policies = [policy for policy in policy_styles if (policy_names == policy).any()]
    policy_order = {policy: float(index) for index, policy in enumerate(drawn_policies) if policy not in pale_policies}
    point_order = np.asarray(policy_names.map(policy_order), dtype=np.float64)
    point_pixels = ax.figure.dpi / 72.0  # in pixels
    pixel_positions = ax.transData.transform(np.column_stack([shares, scores]))
    marker_scales = _nested_sizes(pixel_positions / point_pixels, point_order)
    bar_offsets = _bars_aside(pixel_positions[:, 0] / point_pixels, point_order, lower_ends, upper_ends)
    pixel_positions[:, 0] += bar_offsets * point_pixels
    bar_positions = np.where(bar_offsets == 0, shares, ax.transData.inverted().transform(pixel_positions)[:, 0])
    for policy in drawn_policies:
        policy_points = np.flatnonzero((policy_names == policy).to_numpy())
        policy_points = policy_points[np.argsort(shares[policy_points], kind="stable")]
        if policy in pale_policies:
            ax.plot(
                shares[policy_points],
                scores[policy_points],
                color=PALE,
                marker="o",
                ms=2.5,
                lw=0.6,
                zorder=1.5,
            )
            continue
        marker_style = marker_options(policy_styles[policy])
        bar_style: dict[str, Any] = {"color": marker_style["color"], "lw": 0.7, "zorder": 2.5}
        ax.plot(
            shares[policy_points],
            scores[policy_points],
            color=marker_style["color"],
            lw=0.8,
            alpha=0.45,
            zorder=2,
        )
        ax.vlines(
            bar_positions[policy_points],
            lower_ends[policy_points],
            upper_ends[policy_points],
            **bar_style,
        )
        offset_points = policy_points[bar_offsets[policy_points] != 0]
        if len(offset_points):  # connect them to their points
            ax.hlines(
                scores[offset_points],
                shares[offset_points],
                bar_positions[offset_points],
                **bar_style,
            )
        for index in policy_points:
            point_style = {**marker_style, "ms": marker_style["ms"] * marker_scales[index]}
            ax.plot(shares[index], scores[index], ls="none", zorder=3, **point_style)


def _bars_aside(positions: Floats, lane_order: Floats, lower_ends: Floats, upper_ends: Floats) -> Floats:
    """Return horizontal offsets of error bars that prevent overlaps, in typographic points.

    Bars at nearly the same bytes are packed into lanes, the middle one first; bars in one lane do not overlap.

    Args:
        positions: Positions of the points, in typographic points.
        lane_order: Order in which bars choose a lane; NaN for a point without a bar.
        lower_ends, upper_ends: Ends of the bars.
    """
    offsets = np.zeros(len(positions))
    sorted_indices = np.argsort(positions, kind="stable")
    index_groups = np.split(sorted_indices, np.flatnonzero(np.diff(positions[sorted_indices]) > _LANE) + 1)
    smallest_gap = min(
        (positions[right_group[0]] - positions[left_group[-1]] for left_group, right_group in pairwise(index_groups)),
        default=math.inf,
    )
    for index_group in index_groups:
        lane_members: dict[int, list[int]] = {}
        for bar_index in sorted(
            (int(bar_index) for bar_index in index_group if lane_order[bar_index] >= 0),
            key=lambda bar_index: lane_order[bar_index],
        ):
            free_lanes = (
                lane
                for lane in _LANES
                if all(
                    lower_ends[bar_index] > upper_ends[other_index] or upper_ends[bar_index] < lower_ends[other_index]
                    for other_index in lane_members.get(lane, [])
                )
            )
            lane_members.setdefault(next(free_lanes, 0), []).append(bar_index)
        lane_step = min(_LANE, 0.45 * smallest_gap / (1 + max(map(abs, lane_members), default=0)))
        for lane, members in lane_members.items():
            offsets[members] = lane * lane_step
    return offsets


def _nested_sizes(positions: Floats, draw_order: Floats) -> Floats:
    """Return marker sizes that keep all overlapping markers visible, later ones inside earlier ones.

    Args:
        positions: Positions of the markers, `[n, 2]`, in typographic points.
        draw_order: Drawing order; NaN for markers to ignore.
    """
    is_near = (np.abs(positions[:, None] - positions) < _NEAR).all(-1)
    return np.asarray(1 + _NEST * (is_near & (draw_order > draw_order[:, None])).sum(1), dtype=np.float64)


def _label_front(
    ax: Axes,
    points: pd.DataFrame,
    front_indices: npt.NDArray[np.intp],
    is_coloured: npt.NDArray[np.bool_],
    shares: Floats,
    scores: Floats,
    policy_styles: MarkerStyles,
    labels: Mapping[str, str],
) -> None:
    """Write each policy's name next to its cheapest point on the front, without overlaps.

    The upper left of a front is empty, so it is tried first.
    """
    canvas = ax.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    pixel_positions = ax.transData.transform(np.column_stack([shares, scores]))
    occupied_boxes = [
        Bbox.from_bounds(x_pixel - 4, y_pixel - 4, 8, 8).padded(5) for x_pixel, y_pixel in pixel_positions[is_coloured]
    ]
    axes_box = ax.get_window_extent(renderer).padded(-1)
    cheapest_points: dict[str, int] = {}
    for index in front_indices:
        cheapest_points.setdefault(str(points["policy"][index]), int(index))
    for policy, index in cheapest_points.items():
        text_colour = tuple(0.75 * channel for channel in to_rgb(policy_styles[policy][0]))  # legible as text
        annotation = ax.annotate(
            short(labels.get(policy, policy), 30),
            (shares[index], scores[index]),
            xytext=(0, 0),
            textcoords="offset points",
            color=text_colour,
            zorder=5,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )
        for label_step, (horizontal_side, vertical_side) in product(_LABEL_STEPS, _LABEL_SIDES):
            annotation.set_horizontalalignment("right" if horizontal_side < 0 else "left")
            annotation.set_verticalalignment("bottom" if vertical_side > 0 else "top")
            annotation.set_position((horizontal_side * 3, vertical_side * label_step))
            label_box = annotation.get_window_extent(renderer)
            is_clear = not any(label_box.overlaps(other_box) for other_box in occupied_boxes)
            if (
                is_clear
                and axes_box.contains(label_box.x0, label_box.y0)
                and axes_box.contains(label_box.x1, label_box.y1)
            ):
                occupied_boxes.append(label_box)
                if label_step > _LEADER_FROM:
                    leader = (horizontal_side * 3, vertical_side * (label_step + 1))
                    ax.annotate(
                        "", (shares[index], scores[index]), leader, textcoords="offset points",
                        arrowprops={"arrowstyle": "-", "lw": 0.5, "color": text_colour},
                    )  # fmt: skip
                break
        else:  # no free space: an overlapping name is better than none
            annotation.set_position((0, _LABEL_STEPS[0]))


def _ticks(ax: Axes, byte_axis: ByteAxis, points: pd.DataFrame, panel_width: float, bytes_axis: bool) -> None:
    """Set tick labels: percentages or bytes at the bottom and, if requested, the corresponding bytes at the top."""
    _, unit_size = byte_axis.unit
    if byte_axis.log:
        candidates = LogLocator(10, subs=[1, 2, 5], numticks=99).tick_values(
            byte_axis.low / unit_size, byte_axis.high / unit_size
        )
    else:
        candidates = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(
            byte_axis.low / unit_size, byte_axis.high / unit_size
        )
    tick_shares = [float(tick) * unit_size for tick in candidates]
    tick_shares = [tick for tick in tick_shares if byte_axis.low <= tick <= byte_axis.high]
    if len(tick_shares) < 2:
        spaced = np.geomspace if byte_axis.log else np.linspace
        tick_shares = [float(tick) for tick in spaced(byte_axis.low, byte_axis.high, 4)[1:3]]
    ax.xaxis.set_major_locator(FixedLocator(tick_shares))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(tick_shares, [f"{float(f'{tick / unit_size:.3g}'):g}" for tick in tick_shares])
    if not bytes_axis:
        return
    full_bytes = float(points["kv_bytes_full"].mean())
    top_axis = ax.secondary_xaxis("top")
    top_axis.xaxis.set_minor_locator(NullLocator())
    tick_step = math.ceil(len(tick_shares) * _BYTES_WIDTH / panel_width)
    top_axis.set_xticks(tick_shares[::tick_step], [size(tick * full_bytes) for tick in tick_shares[::tick_step]])
    top_axis.spines["top"].set_visible(True)
