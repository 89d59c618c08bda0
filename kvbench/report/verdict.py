"""The cheapest policy within some points of the full cache, and how certain it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

POINT = 0.01


@dataclass(frozen=True)
class Verdict:
    """Verdict for one task, or for the mean of several, in one panel. "A point" stands for the tolerance.

    Attributes:
        kind: "found" (`row` is the cheapest within a point of full), "none" (`row` is the closest to full), "silent"
            (full is not above chance), "no full" (full has no score), "scale" (scores are not in [0, 1], so points are
            undefined), "whole" (nothing holds less than full), "informed" (all policies see the answer) or "empty"
            (only full was run).
        row: The row of the frame, if the kind has one.
        sure: Whether even the worse end of the row's paired interval is within a point.
        equal: Other rows within a point that hold the same bytes; for "none", rows that are equally close.
        cheaper: Rows that hold less and are not within a point, but whose interval partly is.
        certain: The cheapest row whose whole interval is within a point, if there is one.
        open: For "none", whether the interval of `row` is partly within a point.
        resolution: Distance from the difference of `row` to the worse end of its interval; smaller drops cannot be
            detected.
    """

    kind: str
    row: pd.Series | None = None
    sure: bool = False
    equal: tuple[pd.Series, ...] = ()
    cheaper: tuple[pd.Series, ...] = ()
    certain: pd.Series | None = None
    open: bool = False
    resolution: float = math.nan


def cheapest(setting_rows: pd.DataFrame, *, unit_scaled: bool, within: float = POINT) -> Verdict:
    """Find the policy and budget that holds the fewest bytes within the tolerance; of equal bytes, the best score.

    A setting that holds as much as full saves nothing and is never chosen, nor is a policy that sees the answer.

    Args:
        setting_rows: Cells of one task, or group means, of one panel.
        unit_scaled: Whether the task is scored in [0, 1].
        within: Tolerated loss relative to full, in the task's own unit.
    """
    ok_rows = setting_rows[setting_rows["status"] == "ok"]
    compressed_rows = ok_rows[(ok_rows["policy"] != "full") & ~ok_rows["informed"]]
    if not len(compressed_rows):
        return Verdict("informed" if ok_rows["informed"].any() else "empty")
    if not ok_rows["discriminative"].all():
        # Without full, no task can be compared with chance, so this reason has priority.
        return Verdict("silent" if (ok_rows["policy"] == "full").any() else "no full")
    if compressed_rows["diff"].isna().all():
        return Verdict("no full")
    if not unit_scaled:
        return Verdict("scale")
    # Rows that the report shows as 100% save nothing.
    compressed_rows = compressed_rows[compressed_rows["kv_bytes_live"] < 0.9995 * compressed_rows["kv_bytes_full"]]
    if not len(compressed_rows):
        return Verdict("whole")
    direction_sign = 1.0 if compressed_rows["higher_is_better"].iloc[0] else -1.0
    gains = direction_sign * compressed_rows["diff"]
    worst_gains = compressed_rows["diff_lo"] if direction_sign > 0 else -compressed_rows["diff_hi"]
    best_gains = compressed_rows["diff_hi"] if direction_sign > 0 else -compressed_rows["diff_lo"]
    gain_limit = -within - 1e-9  # a loss of exactly one point is within a point
    ranked_rows = compressed_rows.assign(_gain=gains, _worst=worst_gains, _best=best_gains)
    near_rows = ranked_rows[ranked_rows["_gain"] >= gain_limit]
    sort_columns = ["kv_bytes_live", "_gain"]
    if not len(near_rows):
        closest_rows = ranked_rows[ranked_rows["_gain"] >= ranked_rows["_gain"].max() - 1e-9]
        closest_rows = closest_rows.sort_values("kv_bytes_live", kind="stable")
        best_row = closest_rows.iloc[0]
        return Verdict(
            "none",
            best_row,
            equal=tuple(candidate for _, candidate in closest_rows[1:].iterrows()),
            open=bool(best_row["_best"] >= gain_limit),
            resolution=float(best_row["_gain"] - best_row["_worst"]),
        )
    near_rows = near_rows.sort_values(sort_columns, ascending=[True, False], kind="stable")
    best_row = near_rows.iloc[0]
    equal_rows = near_rows.iloc[1:]
    equal_rows = equal_rows[equal_rows["kv_bytes_live"] <= best_row["kv_bytes_live"] * 1.001]
    cheaper_rows = ranked_rows[
        (ranked_rows["kv_bytes_live"] < best_row["kv_bytes_live"]) & (ranked_rows["_gain"] < gain_limit)
    ]
    cheaper_rows = cheaper_rows[cheaper_rows["_best"] >= gain_limit].sort_values(sort_columns, ascending=[True, False])
    return Verdict(
        "found",
        best_row,
        bool(best_row["_worst"] >= gain_limit),
        tuple(candidate for _, candidate in equal_rows.iterrows()),
        tuple(candidate for _, candidate in cheaper_rows.iterrows()),
        certain=next(
            (candidate for _, candidate in near_rows.iterrows() if candidate["_worst"] >= gain_limit),
            None,
        ),
        resolution=float(best_row["_gain"] - best_row["_worst"]),
    )
