"""Headroom: how far a policy is from an informed reference that holds the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.against import differences
from kvbench.report.frames import (
    Results,
    budget_order,
    informed_policies,
    metric_title,
    policy_title,
    records,
    unit_scale,
)
from kvbench.report.overall import SETTING
from kvbench.tables.numbers import NumberFormat, score_kind
from kvbench.tables.table import Column, Interval, Name, Phrase, Table, TableCell, beside
from kvbench.tables.text import tokens

_SAME_BYTES = 0.01
"""Relative difference of bytes up to which two caches count as equally large."""

_PLACE = [*SETTING, "moment"]
NOTE = (
    "An informed policy sees question and answer. What it scores shows how much better a choice of entries could be, "
    "but not the best possible: it chooses every entry by itself, so another set of as many entries can be better. If "
    "a policy holds other bytes than it at the same budget, its curve is interpolated, without an interval."
)


def headroom(results: Results) -> pd.DataFrame:
    """Return the difference of every policy from an informed policy of its panel, at the same bytes.

    The reference is `oracle`, or the first informed policy of a panel without it.

    Returns:
        A row per panel, budget and policy with `informed_policy`, `unused` (the other informed policies), `share`
        (bytes held), `score`, `informed_score`, `diff` (score minus that of the informed policy, paired) with
        `diff_lo` and `diff_hi`, and `kl` and `informed_kl` if fidelity was measured. No rows without an informed
        policy.
    """
    rows: list[dict[str, Any]] = []
    overall = results.overall
    if not len(overall) or not len(overall[overall["informed"]]):
        return pd.DataFrame(rows)
    ok_rows = overall[overall["status"] == "ok"]
    for _, panel_rows in ok_rows[ok_rows["policy"] != "full"].groupby(_PLACE, sort=False):
        if names := [policy for policy in results.policies if policy in informed_policies(panel_rows)]:
            informed_policy = "oracle" if "oracle" in names else names[0]
            unused = tuple(policy for policy in names if policy != informed_policy)
            rows += [row | {"unused": unused} for row in _panel_rows(results, panel_rows, informed_policy)]
    return pd.DataFrame(rows)


def _panel_rows(results: Results, panel_rows: pd.DataFrame, informed_policy: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one panel."""
    curve = panel_rows[panel_rows["policy"] == informed_policy].sort_values("share", kind="stable")
    panel = panel_rows.iloc[0]
    cells = results.cells
    for field in _PLACE:
        cells = cells[cells[field] == panel[field]]
    paired = {
        (row["policy"], row["budget"]): row for row in records(differences(cells, results.samples, informed_policy))
    }
    by_budget = {row["budget"]: row for row in records(curve)}
    for row in sorted(records(panel_rows[~panel_rows["informed"]]), key=lambda row: budget_order(row["budget"])):
        reference = by_budget.get(row["budget"])
        is_equal = reference is not None and math.isclose(row["share"], reference["share"], rel_tol=_SAME_BYTES)
        pair = paired.get((row["policy"], row["budget"])) if is_equal else None
        if pair is not None and reference is not None:
            compared = {name: pair[name] for name in ("diff", "diff_lo", "diff_hi")}
            compared |= {"informed_score": reference["score"], "informed_kl": reference["kl"]}
        elif curve["share"].min() <= row["share"] <= curve["share"].max():
            compared = _interpolated(row, curve)
        else:
            continue
        names = (*_PLACE, "policy", "budget", "share", "metric", "higher_is_better", "score", "kl")
        yield {name: row[name] for name in names} | {"informed_policy": informed_policy} | compared


def _interpolated(row: Mapping[str, Any], curve: pd.DataFrame) -> dict[str, float]:
    """Return the informed policy's score and KL at a row's bytes, by linear interpolation over their logarithm."""
    positions = np.log(curve["share"].to_numpy(dtype=np.float64))
    score, kl = (
        float(np.interp(math.log(row["share"]), positions, curve[name].to_numpy(dtype=np.float64)))
        for name in ("score", "kl")
    )
    bounds = dict.fromkeys(("diff_lo", "diff_hi"), math.nan)
    return {"diff": row["score"] - score, **bounds, "informed_score": score, "informed_kl": kl}


def headroom_tables(rows: pd.DataFrame) -> Iterator[Table]:
    """Yield a table of headroom per panel."""
    if not len(rows):
        return
    for place, panel_rows in rows.groupby(_PLACE, sort=False):
        model, _, group, length, seed, moment = map(str, place)
        informed_policy = policy_title(panel_rows["informed_policy"].iloc[0], informed=True)
        metric, unused = panel_rows[["metric", "unused"]].iloc[0]
        seed_text = f", seed {seed}" if rows["seed"].nunique() > 1 else ""
        setting = f", {tokens(int(length))}, {moment}{seed_text}: headroom to "
        title: Phrase = (Name(model), " · ", Name(group), setting, informed_policy)
        row_records = records(panel_rows)
        kind = score_kind(unit_scaled=unit_scale(panel_rows.assign(full_score=panel_rows["informed_score"])))
        columns: list[tuple[Column, list[TableCell]]] = [
            (Column("budget", align="right"), [Name(row["budget"]) for row in row_records]),
            (Column("policy"), [Name(row["policy"]) for row in row_records]),
            (Column("KV held", NumberFormat.PERCENT), [row["share"] for row in row_records]),
            (Column(metric_title(metric), kind), [row["score"] for row in row_records]),
            (Column(informed_policy, kind), [row["informed_score"] for row in row_records]),
            (
                Column("difference", kind, signed=True),
                [Interval(row["diff"], row["diff_lo"], row["diff_hi"]) for row in row_records],
            ),
        ]
        if panel_rows["kl"].notna().any() and metric != "kl":
            columns += [
                (Column("KL, nats", NumberFormat.NUMBER), [row["kl"] for row in row_records]),
                (Column(("KL of ", informed_policy), NumberFormat.NUMBER), [row["informed_kl"] for row in row_records]),
            ]
        notes = [NOTE] + [f"Informed policies that are not used here: {', '.join(unused)}."] * bool(unused)
        yield beside(title, columns, notes=notes)
