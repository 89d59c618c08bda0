"""All pairs of policies at once, against the comparison of each pair alone."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from kvbench.regression import pairwise
from kvbench.regression.pairwise import policy_pairs
from kvbench.regression.policies import PolicyComparison, compare_policies
from kvbench.regression.significance import holm
from kvbench.report.filters import filter_cells
from kvbench.report.frames import prepare

from ..report.conftest import Frames, make_run

POLICIES = ["snapkv", "criticalkv", "random", "keydiff"]


def run() -> Frames:
    """Four policies; random lacks some answers of a task, keydiff failed at 0.4, and qa_1 is at chance."""
    cells, samples = make_run(
        POLICIES, ("0.2", "0.4"), ["vt", "cwe", "qa_1"], samples=30, failed=[("keydiff", "0.4", "cwe")]
    )  # fmt: skip
    absent = (samples["policy"] == "random") & (samples["task"] == "cwe") & (samples["doc_id"] % 7 == 0)
    return cells, samples[~absent]


def parts_of(frames: Frames, base: str, policy: str, budget: str) -> PolicyComparison:
    cells, samples = frames
    (comparison,) = compare_policies(prepare(filter_cells(cells, {"budget": [budget]}), samples), base, policy)
    return comparison


def test_every_pair_is_compared_as_alone() -> None:
    frames = run()
    (panel,) = policy_pairs(prepare(*frames))
    assert panel["tasks"] == 2 and panel["group"] == "ruler"
    assert len(panel["tests"]) == 6 + 3  # keydiff has no mean at 0.4
    for budget, base, policy, diff, low, high, _, _, contexts in panel["tests"]:
        alone = parts_of(frames, base, policy, budget).overall
        assert set(alone.tasks) == {"vt", "cwe"}
        assert (diff, low, high) == pytest.approx((alone.change.mean, alone.change.lo, alone.change.hi), abs=1e-6)
        assert contexts == alone.contexts


def test_p_is_corrected_for_all_comparisons_with_the_base() -> None:
    frames = run()
    (panel,) = policy_pairs(prepare(*frames))
    families: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for budget, base, policy, *_, p_base, p_policy, _ in panel["tests"]:
        p_alone = parts_of(frames, base, policy, budget).overall.p
        families[base].append((p_alone, p_base))
        families[policy].append((p_alone, p_policy))
    assert {base: len(family) for base, family in families.items()} == {
        "snapkv": 5, "criticalkv": 5, "random": 5, "keydiff": 3
    }  # fmt: skip
    for family in families.values():
        assert [corrected for _, corrected in family] == pytest.approx(holm([p for p, _ in family]), rel=1e-3)


def test_equal_scores_are_no_test() -> None:
    cells, samples = make_run(["snapkv", "random", "keydiff"], ("0.2",), ["vt"], samples=20)
    samples = samples.assign(score=samples["score"].where(samples["policy"] == "random", 1.0))
    (panel,) = policy_pairs(prepare(cells, samples))
    by_pair = {(base, policy): row for _, base, policy, *row in panel["tests"]}
    assert by_pair["snapkv", "keydiff"][0] == 0 and by_pair["snapkv", "keydiff"][3:5] == [1.0, 1.0]
    unequal = by_pair["snapkv", "random"]
    assert unequal[3] < unequal[4]  # snapkv has one test, random two


def test_panels_beyond_the_limit_have_no_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    results = prepare(*make_run(POLICIES, ("0.2",), ["vt"], samples=8, moments=("context", "question")))
    monkeypatch.setattr(pairwise, "MOST_TESTS", 6)
    assert [len(panel["tests"] or ()) for panel in policy_pairs(results)] == [6, 0]
    assert policy_pairs(results)[1]["tests"] is None


def test_a_run_that_cannot_be_compared_has_no_tests() -> None:
    def tests(frames: Frames) -> list[Any]:
        (panel,) = policy_pairs(prepare(*frames))
        json.dumps(panel, allow_nan=False)
        return list(panel["tests"])

    assert tests(make_run(["snapkv"], ("0.2",), ["vt"], samples=4)) == []
    assert tests(make_run(["snapkv", "random"], ("0.2",), ["vt"], samples=4, chance=1.0)) == []
    cells, samples = make_run(["snapkv", "random"], ("0.2",), ["vt", "cwe"], samples=4)
    cells["higher_is_better"] = cells["task"] == "vt"
    assert tests((cells, samples)) == []
