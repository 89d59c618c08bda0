"""Shares, changes and intervals by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvbench.analysis.perturbation import comparison
from kvbench.stats import T, resampled, wilson


def table(values: dict[str, Any], contexts: list[str], budget: str = "0.2") -> pd.DataFrame:
    """Rows of `heads` from l1 `[questions, layers, heads]` by policy."""
    rows = []
    for policy, l1 in values.items():
        for q, layers in enumerate(l1):
            for layer, heads in enumerate(layers):
                for head, x in enumerate(heads):
                    rows.append({
                        "model": "m", "task": "t", "length": 0, "moment": "context",
                        "policy": policy, "budget": budget, "sample_id": f"s{q}", "question_id": 0,
                        "context_id": contexts[q], "layer": layer, "head": head, "l1": x,
                        "output": 10.0, "mass": 0.8, "stage1_mass": 0.3 + 0.4 * (head == 0),
                        "top_mass": 0.9, "bound1": 2 * x, "bound2": 3 * x + (head == 1),
                        "bound3": 0.5 * x,
                    })  # fmt: skip
    return pd.DataFrame(rows)


def test_shares_and_change_by_hand() -> None:
    old = [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 4.0]]]
    new = [[[0.5, 2.0], [3.0, 9.0]], [[0.5, 2.0], [3.2, 1.0]]]
    # heads: won, tie, lost by mean (3.1 > 3), lost by mean (5 > 4)
    (row,) = comparison.pairs(table({"old": old, "new": new}, ["a", "b"])).to_dict("records")
    assert (row["policy"], row["against"]) == ("new", "old")
    assert row["heads_won"] == pytest.approx(1.5 / 4)
    # question 1: won, tie, tie, lost; question 2: won, tie, lost, won
    assert row["queries_won"] == pytest.approx((2.0 / 4 + 2.5 / 4) / 2)
    assert row["change"] == pytest.approx((0.5 + 2 + 3.1 + 5) / 10 - 1)
    assert (row["heads"], row["questions"], row["contexts"]) == (4, 2, 2)
    assert (row["heads_won_lo"], row["heads_won_hi"]) == pytest.approx(wilson(1.5 / 4, 2))
    assert (row["change_lo"], row["change_hi"]) == (-math.inf, math.inf)


def test_the_pairing_does_not_depend_on_the_order_of_rows() -> None:
    rng = np.random.default_rng(0)
    frame = table({"old": rng.random((7, 2, 3)), "new": rng.random((7, 2, 3))}, list("aabcdef"))
    shuffled = frame.sample(frac=1, random_state=0)
    shuffled = pd.concat([shuffled[shuffled["policy"] == p] for p in ("old", "new")])
    pd.testing.assert_frame_equal(comparison.pairs(frame), comparison.pairs(shuffled))
    first, second = (comparison.cells(f).sort_values("policy") for f in (frame, shuffled))
    pd.testing.assert_frame_equal(first.reset_index(drop=True), second.reset_index(drop=True))


def test_the_bootstrap_draws_contexts_and_not_questions() -> None:
    rng = np.random.default_rng(1)
    contexts = list("aaabbcdeefg")
    a, b = rng.random((11, 6)), rng.random((11, 6))
    found = comparison.compare_policies(a, b, contexts)
    names = sorted(set(contexts))
    shares, ratios = [], []
    for drawn in resampled(lambda w: w, len(names)):
        rows: list[int] = []
        for context, times in zip(names, drawn, strict=True):
            rows += [q for q in range(11) if contexts[q] == context] * int(times)
        x, y = a[rows].mean(0), b[rows].mean(0)
        shares.append(float(np.mean((x < y) + 0.5 * (x == y))))
        ratios.append(x.mean() / y.mean() - 1)
    lo, hi = np.quantile(shares, [0.025, 0.975])
    assert found["heads_won_lo"] == pytest.approx(min(lo, found["heads_won"]))
    assert found["heads_won_hi"] == pytest.approx(max(hi, found["heads_won"]))
    want = np.quantile(ratios, [0.025, 0.975])
    assert [found["change_lo"], found["change_hi"]] == pytest.approx(list(want))


def test_equal_policies_tie() -> None:
    x = np.random.default_rng(0).random((6, 4))
    found = comparison.compare_policies(x, x, list("abcdef"))
    assert (found["heads_won"], found["queries_won"], found["change"]) == (0.5, 0.5, 0.0)
    nothing = comparison.compare_policies(0 * x, 0 * x, list("abcdef"))
    assert nothing["change"] == 0.0
    endless = comparison.compare_policies(x, 0 * x, list("abcdef"))
    assert [endless[f"change{end}"] for end in ("", "_lo", "_hi")] == [
        math.inf,
        -math.inf,
        math.inf,
    ]


def test_the_assumption_and_the_bounds_by_hand() -> None:
    l1 = [[[1.0, 2.0]], [[3.0, 4.0]]]
    heads = table({"p": l1}, ["a", "b"])
    (row,) = comparison.cells(heads).to_dict("records")
    assert row["l1"] == 2.5
    assert row["relative"] == pytest.approx(0.25)
    assert row["assumption"] == 0.5  # head 0 holds, head 1 does not
    assert row["assumption_top"] == 1.0
    assert row["tightness1"] == pytest.approx(2.0)
    assert row["rows"] == 4
    assert row["tightness2"] == pytest.approx(3.0)  # over head 0 alone
    assert (row["violations1"], row["violations2"], row["violations3"]) == (0, 0, 2)
    held = heads[heads["stage1_mass"] > 0.5]
    assert [row[f"bound{i}"] for i in (1, 2, 3)] == [held[f"bound{i}"].mean() for i in (1, 2, 3)]
    assert row["bound_ratio"] == pytest.approx(held["bound2"].sum() / held["bound3"].sum())
    assert (row["l1_lo"], row["l1_hi"]) == (-math.inf, math.inf)  # two contexts say nothing


def test_what_is_unknown_stays_unknown() -> None:
    frame = table({"p": [[[1.0, 2.0]], [[3.0, 4.0]]]}, ["a", "b"])
    for name in ("stage1_mass", "top_mass", "bound1", "bound2", "bound3"):
        frame[name] = math.nan
    (row,) = comparison.cells(frame).to_dict("records")
    assert math.isnan(row["assumption"]) and math.isnan(row["tightness1"])
    assert row["violations1"] == row["violations2"] == 0


def test_rounding_is_no_violation() -> None:
    l1 = np.array([1.0, 1.0, 1e-13, 0.0])
    bound = np.array([1 - 1e-6, 0.99, 0.0, 0.0])
    assert comparison.violated(l1, bound).tolist() == [False, True, False, False]


def test_an_interval_of_small_numbers_is_none_of_shares() -> None:
    """An l1 between 0 and 1 is no score: one context that differs makes a wide interval anyway."""
    frame = table({"p": [[[0.1]]] * 9 + [[[0.9]]]}, list("abcdefghij"))
    (row,) = comparison.cells(frame).to_dict("records")
    half = T[8] * np.std([0.1] * 9 + [0.9], ddof=1) / np.sqrt(10)  # few contexts: Student's t
    assert [row["l1_lo"], row["l1_hi"]] == pytest.approx([0.18 - half, 0.18 + half])
