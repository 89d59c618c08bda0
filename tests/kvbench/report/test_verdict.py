"""The cheapest policy and budget within a point of the full cache."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvbench.report.choosing import sentence
from kvbench.report.verdict import cheapest


def points(*rows):
    columns = ["policy", "budget", "kv_bytes_live", "diff", "diff_lo", "diff_hi", "score"]
    frame = pd.DataFrame([("full", "full", 100.0, 0, 0, 0, 0.9), *rows], columns=columns)
    frame = frame.assign(kv_bytes_full=100.0, share=frame["kv_bytes_live"] / 100)
    return frame.assign(
        samples=20, status="ok", discriminative=True, informed=False, higher_is_better=True, full_score=0.9
    )


def test_cheapest_within_a_point():
    rows = points(
        ("a", "0.1", 10.0, -0.05, -0.08, 0.02, 0.85),
        ("b", "0.2", 20.0, -0.01, -0.03, 0.01, 0.89),
        ("c", "0.2", 20.0, -0.005, -0.008, 0.01, 0.895),
        ("d", "0.4", 40.0, 0.0, 0.0, 0.0, 0.9),
    )
    verdict = cheapest(rows, unit_scaled=True)
    assert verdict.row["policy"] == "c"
    assert verdict.sure
    assert [r["policy"] for r in verdict.equal] == ["b"]
    assert [r["policy"] for r in verdict.cheaper] == ["a"]
    doubtful = cheapest(rows[rows["policy"] != "c"], unit_scaled=True)
    assert doubtful.row["policy"] == "b"
    assert not doubtful.sure


def test_cheapest_says_when_there_is_none():
    rows = points(("a", "0.1", 10.0, -0.5, -0.6, -0.4, 0.4), ("b", "0.4", 40.0, -0.2, -0.3, -0.1, 0.7))
    verdict = cheapest(rows, unit_scaled=True)
    assert (verdict.kind, verdict.row["policy"]) == ("none", "b")
    assert cheapest(rows, unit_scaled=False).kind == "scale"
    assert cheapest(rows.assign(discriminative=False), unit_scaled=True).kind == "silent"
    alone = rows.iloc[1:].assign(diff=np.nan, discriminative=False)
    assert cheapest(alone, unit_scaled=True).kind == "no full"
    assert cheapest(rows.iloc[:1], unit_scaled=True).kind == "empty"
    assert cheapest(rows.assign(informed=rows["policy"] != "full"), unit_scaled=True).kind == "informed"


def test_cheapest_never_names_what_holds_everything():
    whole = ("local", "full", 100.0, 0.0, 0.0, 0.0, 0.9)
    low = ("a", "0.1", 10.0, -0.5, -0.6, -0.4, 0.4)
    verdict = cheapest(points(whole, low), unit_scaled=True)
    assert (verdict.kind, verdict.row["policy"]) == ("none", "a")
    assert cheapest(points(whole), unit_scaled=True).kind == "whole"
    near = ("b", "0.99", 99.0, 0.0, 0.0, 0.0, 0.9)
    assert cheapest(points(whole, near), unit_scaled=True).row["policy"] == "b"


def test_ties_are_named_where_none_is_within_a_point():
    rows = points(
        ("a", "0.4", 40.0, -0.2, -0.3, -0.1, 0.7),
        ("b", "0.2", 20.0, -0.2, -0.3, -0.1, 0.7),
        ("c", "0.4", 40.0, -0.3, -0.4, -0.2, 0.6),
        ("d", "0.2", 20.0, -0.2, -0.4, -0.1, 0.7),
    )
    verdict = cheapest(rows, unit_scaled=True)
    assert verdict.row["policy"] == "b"
    text = sentence(verdict)
    assert text.startswith("none; `b` at `0.2` (20.0% of the bytes; −20.0 [−30.0, −10.0] points from full) comes")
    assert text.endswith("Equally close: `d` at `0.2` (20.0%), `a` at `0.4` (40.0%).")
    assert "Equally close" not in sentence(cheapest(rows.iloc[[0, 1, 3]], unit_scaled=True))


def test_cheapest_where_less_is_better():
    rows = points(("a", "0.1", 10.0, 0.1, 0.05, 0.2, 1.0), ("b", "0.4", 40.0, 0.005, 0.0, 0.02, 0.905))
    verdict = cheapest(rows.assign(higher_is_better=False), unit_scaled=True)
    assert verdict.row["policy"] == "b"
    assert not verdict.sure
