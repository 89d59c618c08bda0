"""The cheapest policy within some points of full, and how certain that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

POINT = 0.01


@dataclass(frozen=True)
class Verdict:
    """What can be said about one task, or the mean of several, in one panel.

    Attributes:
        kind: "found" (`row` is the cheapest within a point of full), "none" (`row` is the closest
            to full), "silent" (full is not above chance), "no full" (full has no score), "scale"
            (scores are not in [0, 1], so a point means nothing), "whole" (nothing holds less than
            full) or "empty" (only full was run).
        row: The row of the frame, if the kind has one.
        sure: Whether even the unfavourable end of its paired interval is within a point.
        equal: Other rows within a point that hold the same bytes; for "none", rows that are equally
            close.
        cheaper: Rows that hold less and are not within a point, but whose interval is in part.
        certain: The cheapest row whose whole interval is within a point, if there is one.
        open: For "none", whether the interval of `row` is within a point in part.
        resolution: How far the interval of `row` reaches from its difference to a larger loss: a
            smaller drop cannot be told from none.
    """

    kind: str
    row: pd.Series | None = None
    sure: bool = False
    equal: tuple[pd.Series, ...] = ()
    cheaper: tuple[pd.Series, ...] = ()
    certain: pd.Series | None = None
    open: bool = False
    resolution: float = math.nan


def cheapest(rows: pd.DataFrame, *, unit: bool, within: float = POINT) -> Verdict:
    """Find the policy and budget that holds the fewest bytes among those within a point of full.

    A setting that holds as much as full saves nothing and is never named.

    Args:
        rows: Cells of one task, or group means, of one panel.
        unit: Whether the task is scored in [0, 1].
        within: How far from full counts as the same, in the task's own unit.

    Returns:
        The verdict. Of several settings that hold the same bytes it names the best.
    """
    ok = rows[rows["status"] == "ok"]
    points = ok[ok["policy"] != "full"]
    if not len(points):
        return Verdict("empty")
    if not ok["discriminative"].all():
        # Without full no task can be compared with chance, so that reason goes first.
        return Verdict("silent" if (ok["policy"] == "full").any() else "no full")
    if points["diff"].isna().all():
        return Verdict("no full")
    if not unit:
        return Verdict("scale")
    # What the report shows as 100% saves nothing.
    points = points[points["kv_bytes_live"] < 0.9995 * points["kv_bytes_full"]]
    if not len(points):
        return Verdict("whole")
    sign = 1.0 if points["higher_is_better"].iloc[0] else -1.0
    gain = sign * points["diff"]
    worst = points["diff_lo"] if sign > 0 else -points["diff_hi"]
    best = points["diff_hi"] if sign > 0 else -points["diff_lo"]
    slack = -within - 1e-9  # a loss of exactly one point is within a point
    ranked = points.assign(_gain=gain, _worst=worst, _best=best)
    good = ranked[ranked["_gain"] >= slack]
    order = ["kv_bytes_live", "_gain"]
    if not len(good):
        closest = ranked[ranked["_gain"] >= ranked["_gain"].max() - 1e-9]
        closest = closest.sort_values("kv_bytes_live", kind="stable")
        row = closest.iloc[0]
        return Verdict(
            "none",
            row,
            equal=tuple(r for _, r in closest[1:].iterrows()),
            open=bool(row["_best"] >= slack),
            resolution=float(row["_gain"] - row["_worst"]),
        )
    good = good.sort_values(order, ascending=[True, False], kind="stable")
    row = good.iloc[0]
    equal = good.iloc[1:]
    equal = equal[equal["kv_bytes_live"] <= row["kv_bytes_live"] * 1.001]
    less = ranked[(ranked["kv_bytes_live"] < row["kv_bytes_live"]) & (ranked["_gain"] < slack)]
    less = less[less["_best"] >= slack].sort_values(order, ascending=[True, False])
    return Verdict(
        "found",
        row,
        bool(row["_worst"] >= slack),
        tuple(r for _, r in equal.iterrows()),
        tuple(r for _, r in less.iterrows()),
        certain=next((r for _, r in good.iterrows() if r["_worst"] >= slack), None),
        resolution=float(row["_gain"] - row["_worst"]),
    )
