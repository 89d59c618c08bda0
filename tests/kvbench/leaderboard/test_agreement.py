"""Cells that several publications measured, and whether they agree."""

from __future__ import annotations

import json

import pytest

from kvbench import stats
from kvbench.leaderboard.agreement import compare_publications

from ..report.conftest import make_run, unaveraged
from .conftest import with_scores

CELL = {"policy": "snapkv", "budget": "0.2", "task": "vt"}


def test_equal_runs_agree_and_each_common_cell_is_compared() -> None:
    frames = make_run(["snapkv"], ("0.2", "0.4"), ["vt", "cwe"], samples=20)
    fewer = make_run(["snapkv", "adakv"], ("0.2",), ["vt"], samples=10)
    agreement = compare_publications([frames, fewer, frames])
    assert agreement.compared_count == 2 + 2 + 6  # full and snapkv at 0.2 on vt with the second, all with the third
    assert agreement.disagreements == {}


def test_a_difference_is_paired_by_question_and_under_both_cells() -> None:
    frames = make_run(samples=20)
    other = with_scores(frames, 0.0, **CELL)
    other[0].loc[other[0]["policy"] == "snapkv", "versions"] = json.dumps({"kvbench": "0.1.0", "torch": "2.14.0"})
    agreement = compare_publications([frames, other])
    cells = frames[0].set_index(list(CELL))["cell"]
    cell = cells.loc[tuple(CELL.values())]
    assert set(agreement.disagreements) == {(0, cell), (1, cell)}
    (here,), (there,) = agreement.disagreements[0, cell], agreement.disagreements[1, cell]
    before = frames[1][frames[1]["cell"] == cell]["score"]
    expected = stats.paired_values(before, [0.0] * 20, list(map(str, range(20))))
    assert (here.difference.mean, here.difference.n) == (pytest.approx(expected.mean), 20)
    assert (here.other, there.other, here.is_paired, here.task) == (1, 0, True, "vt")
    assert here.difference.lo == pytest.approx(-there.difference.hi) and here.difference.lo > 0
    assert here.settings == {"torch": ("2.13.0", "2.14.0")} and there.settings == {"torch": ("2.14.0", "2.13.0")}


def test_a_difference_within_the_interval_is_none() -> None:
    frames = make_run(["snapkv"], ("0.4",), ["vt"], samples=20)
    first = frames[1].index[frames[1]["policy"] == "snapkv"][0]
    other = (frames[0], frames[1].copy())
    other[1].loc[first, "score"] = 1 - other[1].loc[first, "score"]
    agreement = compare_publications([frames, other])
    assert (agreement.compared_count, agreement.disagreements) == (2, {})


def test_without_common_questions_the_intervals_decide() -> None:
    frames = make_run(["snapkv"], ("0.2",), ["vt"], samples=20)
    other = with_scores(frames, 0.0, policy="snapkv")
    other = (other[0], other[1].assign(sample_id=[f"other-{name}" for name in other[1]["sample_id"]]))
    other[0].loc[other[0]["policy"] == "snapkv", ["score", "score_lo", "score_hi"]] = [0.0, 0.0, 0.16]
    agreement = compare_publications([frames, other])
    (found,) = (found for (index, _), (found,) in agreement.disagreements.items() if index == 0)
    row = frames[0][frames[0]["policy"] == "snapkv"].iloc[0]
    assert not found.is_paired
    assert found.difference.mean == pytest.approx(row["score"])
    lower = row["score"] - ((row["score"] - row["score_lo"]) ** 2 + 0.16**2) ** 0.5
    assert found.difference.lo == pytest.approx(lower) and lower > 0


def test_scores_that_are_no_means_are_compared_by_their_intervals() -> None:
    frames = unaveraged(make_run(["snapkv"], ("0.2",), ["vt"], samples=8), "vt")
    other = (frames[0].copy(), frames[1])
    changed = other[0]["policy"] == "snapkv"
    other[0].loc[changed, ["score", "score_lo", "score_hi"]] = [15.0, 14.0, 17.0]
    agreement = compare_publications([frames, other])
    assert {round(found.difference.mean) for (found,) in agreement.disagreements.values()} == {-10, 10}


def test_failed_cells_and_other_metrics_are_not_compared() -> None:
    frames = make_run(["snapkv"], ("0.2",), ["vt"], samples=8)
    failed = make_run(["snapkv"], ("0.2",), ["vt"], samples=8, failed=[("snapkv", "0.2", "vt")])
    assert compare_publications([frames, failed]).compared_count == 1
    judged = (frames[0].assign(metric="accuracy (judge x)"), frames[1])
    assert compare_publications([frames, judged]).compared_count == 0
