"""The mean over tasks, its stratified and paired bootstrap, and what is left out of it."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from kvbench.report.overall import group_means
from kvbench.stats import few_vary, resampled, summary

from .conftest import unaveraged


def row_of(frame, policy, budget="full"):
    found = frame[(frame["policy"] == policy) & (frame["budget"] == budget)]
    assert len(found) == 1
    return found.iloc[0]


def test_a_single_task_has_the_numbers_of_its_cells(run_frames):
    cells, samples = run_frames(tasks=["vt"])
    means = group_means(cells, samples)
    assert len(means) == len(cells)
    for _, cell in cells.iterrows():
        got = row_of(means, cell["policy"], cell["budget"])
        for column in ("score", "score_lo", "score_hi", "diff", "diff_lo", "diff_hi"):
            assert got[column] == pytest.approx(cell[column], abs=1e-12), column
        assert got["kv_bytes_live"] == cell["kv_bytes_live"]


def test_mean_over_tasks_equals_a_slow_stratified_bootstrap(run_frames):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt", "cwe", "fwe"], full_level=0.8)
    got = row_of(group_means(cells, samples, n=200), "snapkv", "0.2")
    draws, gaps = np.zeros(200), np.zeros(200)
    for task in ("vt", "cwe", "fwe"):
        part = samples[samples["task"] == task]
        by = part.pivot(index="context_id", columns="policy", values="score").sort_index()
        assert not few_vary(by["snapkv"].to_numpy())
        assert not few_vary((by["snapkv"] - by["full"]).to_numpy())
        weights = resampled(lambda w: w, 50, draw_count=200, stream=zlib.crc32(task.encode()))
        for i, row in enumerate(weights):
            drawn = np.repeat(np.arange(50), row.astype(int))
            draws[i] += by["snapkv"].to_numpy()[drawn].mean() / 3
            gaps[i] += (by["snapkv"] - by["full"]).to_numpy()[drawn].mean() / 3
    ends = np.percentile(draws, [2.5, 97.5])
    assert (got["score_lo"], got["score_hi"]) == pytest.approx(tuple(ends), abs=1e-12)
    ends = np.percentile(gaps, [2.5, 97.5])
    assert (got["diff_lo"], got["diff_hi"]) == pytest.approx(tuple(ends), abs=1e-12)
    assert got["score"] == pytest.approx(cells.loc[cells["policy"] == "snapkv", "score"].mean())
    assert got["samples"] == 150


def test_intervals_joined_from_cells_are_close(run_frames):
    cells, samples = run_frames(tasks=["vt", "cwe", "fwe", "niah_single_1"])
    exact, joined = group_means(cells, samples), group_means(cells)
    for column in ("score", "score_lo", "score_hi", "diff", "diff_lo", "diff_hi"):
        # A percentile of a mean of four against joined percentiles: about a point apart.
        assert joined[column].to_numpy() == pytest.approx(exact[column].to_numpy(), abs=0.02)


def test_tasks_that_are_all_right_still_leave_room_for_error(run_frames):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"], full_level=1.0)
    full = row_of(group_means(cells, samples), "full")
    assert full["score"] == 1.0
    assert full["score_lo"] == pytest.approx(1 - 0.0713 / np.sqrt(2), abs=0.001)
    assert (full["diff"], full["diff_lo"], full["diff_hi"]) == (0.0, 0.0, 0.0)


def test_a_failed_task_leaves_its_policy_without_a_mean(run_frames):
    cells, samples = run_frames(failed=[("snapkv", "0.2", "cwe")])
    means = group_means(cells, samples)
    lost = row_of(means, "snapkv", "0.2")
    assert lost["status"] == "error"
    assert np.isnan([lost["score"], lost["diff"], lost["kv_bytes_live"]]).all()
    assert row_of(means, "snapkv", "0.4")["status"] == "ok"


def test_tasks_that_do_not_discriminate_are_left_out(run_frames):
    cells, samples = run_frames(tasks=["vt", "qa_1"])
    means = group_means(cells, samples)
    assert (means["tasks"] == 1).all()
    vt = cells[(cells["task"] == "vt") & (cells["policy"] == "full")]
    assert row_of(means, "full")["score"] == vt["score"].iloc[0]


def test_there_is_no_mean_of_no_task(run_frames):
    silent = run_frames(chance=0.999)
    assert not len(group_means(*silent))
    assert not len(group_means(silent[0]))
    alone = group_means(*run_frames(tasks=["vt"], chance=0.999))
    assert (alone["status"] == "ok").all()  # its score is no mean
    assert not alone["discriminative"].any()


def test_means_of_unlike_tasks_are_not_made(run_frames):
    cells, samples = run_frames()
    turned = cells.assign(higher_is_better=cells["task"] == "vt")
    assert not len(group_means(turned, samples))
    large = cells.assign(score=cells["score"].where(cells["task"] == "vt", cells["score"] * 90))
    assert not len(group_means(large, samples))


def test_without_full_there_is_a_mean_and_no_difference(run_frames):
    means = group_means(*run_frames(with_full=False))
    assert (means["status"] == "ok").all()
    assert (means["tasks"] == 2).all()
    assert means["diff"].isna().all()


def test_pairs_are_the_questions_that_both_answered(run_frames):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"])
    part = samples[(samples["policy"] == "full") | (samples["doc_id"] < 20)]
    got = row_of(group_means(cells, part), "snapkv", "0.2")
    by = part[part["doc_id"] < 20].pivot(index="doc_id", columns="policy", values="score")
    assert got["diff"] == pytest.approx((by["snapkv"] - by["full"]).mean())
    assert got["full_score"] == pytest.approx(by["full"].mean()) != row_of(group_means(cells, part), "full")["score"]


def test_a_score_that_is_no_mean_is_in_no_mean_and_keeps_its_interval_alone(run_frames):
    both = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"])
    means = group_means(*unaveraged(both, "cwe"))
    assert (means["tasks"] == 1).all()
    assert row_of(means, "snapkv", "0.2")["score"] == pytest.approx(
        both[0].query("task == 'vt' and policy == 'snapkv'")["score"].item()
    )
    alone = run_frames(["snapkv"], ("0.2",), ["cwe"])
    for samples in (unaveraged(alone, "cwe")[1], None):
        row = row_of(group_means(unaveraged(alone, "cwe")[0], samples), "snapkv", "0.2")
        assert (row["score"], row["score_lo"], row["score_hi"]) == (5, 4, 7)
        assert (row["diff"], row["diff_lo"], row["diff_hi"], row["full_score"]) == (2, 1, 4, 3)
    cells, samples = unaveraged(unaveraged(both, "vt"), "cwe")
    assert not len(group_means(cells, samples)), "no task is left"


def as_kl(frames, scales):
    """A run whose scores are distances, of another size in every task."""
    cells, samples = (frame.copy() for frame in frames)
    for frame in (cells, samples):
        frame["score"] = (1 - frame["score"]) * frame["task"].map(scales)
    return cells.assign(metric="kl", higher_is_better=False, discriminative=True), samples


def test_few_contexts_without_bounds_get_students_interval(run_frames):
    frames = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"], samples=9, full_level=0.5)
    cells, samples = as_kl(frames, {"vt": 3.0, "cwe": 9.0})
    squares = []
    for task in ("vt", "cwe"):
        values = samples[(samples["task"] == task) & (samples["policy"] == "snapkv")]
        alone = summary(values["score"].tolist(), values["context_id"].tolist(), has_bounds=False)
        one = row_of(group_means(cells[cells["task"] == task], samples), "snapkv", "0.2")
        assert (one["score_lo"], one["score_hi"]) == pytest.approx((alone.lo, alone.hi))
        assert alone.hi > alone.mean
        squares.append((alone.hi - alone.mean) ** 2)
    both = row_of(group_means(cells, samples), "snapkv", "0.2")
    assert both["score_hi"] - both["score"] == pytest.approx(np.sqrt(sum(squares)) / 2)


def test_distances_below_one_are_no_scores_in_points(run_frames):
    frames = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"], samples=20)
    assert len(group_means(*as_kl(frames, {"vt": 0.5, "cwe": 9.0})))
