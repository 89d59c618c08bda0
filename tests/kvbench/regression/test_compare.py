"""What a comparison of two runs says about each cell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.errors import UserError
from kvbench.regression.compare import Outcome, compare
from kvbench.regression.pairs import pair_cells, pair_with_full

from ..report.conftest import unaveraged
from .conftest import one_cell, rescored, usual, without


def outcome(before: list[float], after: list[float], **options: float) -> Outcome:
    return compare(one_cell(before), one_cell(after), **options).cells[0].outcome


def test_a_run_is_no_worse_than_itself() -> None:
    found = compare(usual(), usual())
    assert len(found.cells) == 10 and found.complete and not found.failed
    assert {cell.outcome for cell in found.cells} == {Outcome.SAME}
    assert {(cell.p, cell.p_corrected, cell.change.mean) for cell in found.cells} == {(1.0, 1.0, 0.0)}
    assert found.made == {} and found.tested == 0


def test_the_cell_that_lost_its_answers_fails_and_no_other() -> None:
    found = compare(usual(), rescored(usual(), [0.0] * 40))
    (failed,) = found.of(Outcome.FAILED)
    place = failed.pair.place
    assert (place.task, place.policy, place.budget) == ("vt", "snapkv", "0.2")
    assert failed.change.mean == pytest.approx(failed.after - failed.before)
    assert failed.change.hi < 0 and failed.p_corrected < 0.001
    assert len(found.of(Outcome.SAME)) == 9


@pytest.mark.parametrize(
    ("before", "after", "options", "expected"),
    [
        ([1.0] * 20, [0.0] * 6 + [1.0] * 14, {}, Outcome.FAILED),
        ([1.0] * 20, [0.0] * 5 + [1.0] * 15, {}, Outcome.UNPROVEN),  # p = 2 / 2**5
        ([1.0] * 20, [0.0] * 5 + [1.0] * 15, {"alpha": 0.1}, Outcome.FAILED),
        ([1.0] * 20, [0.0] * 6 + [1.0] * 14, {"max_drop": 30.0}, Outcome.ALLOWED),
        ([1.0] * 20, [0.0] * 6 + [1.0] * 14, {"max_drop": 29.9}, Outcome.FAILED),
        ([0.0] * 20, [1.0] * 6 + [0.0] * 14, {}, Outcome.IMPROVED),
        ([0.0] * 20, [1.0] * 5 + [0.0] * 15, {}, Outcome.HIGHER),
        ([1.0, 0.0] * 10, [0.0, 1.0] * 10, {}, Outcome.HIGHER),  # others right, as many
        ([1.0] * 4, [0.0] * 4, {}, Outcome.UNPROVEN),
    ],
)
def test_outcomes(before: list[float], after: list[float], options: dict[str, float], expected: Outcome) -> None:
    assert outcome(before, after, **options) is expected


def test_where_less_is_better_a_rise_is_the_drop() -> None:
    low, high = [2.0] * 20, [2.5] * 20
    assert compare(one_cell(low, higher=False), one_cell(high, higher=False)).failed
    found = compare(one_cell(high, higher=False), one_cell(low, higher=False))
    assert found.cells[0].outcome is Outcome.IMPROVED


def test_outside_zero_to_one_the_allowance_is_in_percent_of_the_baseline() -> None:
    before, after = one_cell([200.0] * 20), one_cell([197.0] * 20)  # a drop of 1.5%
    assert compare(before, after, max_drop=1.4).failed
    found = compare(before, after, max_drop=1.6)
    assert found.cells[0].outcome is Outcome.ALLOWED
    assert found.cells[0].allowed == pytest.approx(3.2)
    assert not found.cells[0].unit


def test_questions_about_one_context_count_once() -> None:
    before, after = [1.0] * 40, [0.0] * 20 + [1.0] * 20
    assert compare(one_cell(before), one_cell(after)).failed
    # The same 20 lost answers, all about 4 of 8 contexts: 2 / 2**4 is no evidence.
    shared = compare(one_cell(before, contexts=8), one_cell([float(i % 8 >= 4) for i in range(40)], contexts=8))
    assert shared.cells[0].outcome is Outcome.UNPROVEN
    assert shared.cells[0].contexts == 8 and shared.cells[0].p == pytest.approx(2 / 2**4)


def test_only_shared_samples_count() -> None:
    found = compare(usual(40), usual(30))
    assert {cell.pair.responses for cell in found.cells} == {30}
    assert {cell.outcome for cell in found.cells} == {Outcome.SAME}
    worse = rescored(usual(40), [0.0] * 40)
    shared = compare(usual(30), worse).of(Outcome.FAILED)[0]
    assert shared.contexts == 30 and shared.after == 0.0


def test_p_is_corrected_for_the_cells_whose_scores_differ() -> None:
    before, after = usual(), rescored(usual(), [0.0] * 40)
    alone = compare(before, after).of(Outcome.FAILED)[0]
    assert alone.p_corrected == alone.p
    for policy in ("snapkv", "keydiff"):
        for budget in ("0.2", "0.4"):
            after = rescored(after, [0.5], task="cwe", policy=policy, budget=budget)
    found = compare(before, after)
    assert found.tested == 5
    assert found.of(Outcome.FAILED)[0].p_corrected == pytest.approx(5 * alone.p, rel=0.5)
    # A response that changed without a score adds no test.
    same = rescored(before, list(before[1]["score"][:1]), policy="full", budget="full")
    assert compare(before, same).tested == 0


# --- what few samples can show --------------------------------------------------------------------


def test_a_pass_says_which_drop_the_samples_could_have_shown() -> None:
    found = compare(one_cell([1.0] * 60), one_cell([1.0] * 60)).cells[0]
    assert found.visible == pytest.approx(6 / 60)  # 2 / 2**6 is the first p below 0.05
    assert outcome([1.0] * 60, [0.0] * 6 + [1.0] * 54) is Outcome.FAILED
    assert outcome([1.0] * 60, [0.0] * 5 + [1.0] * 55) is Outcome.UNPROVEN


def test_four_samples_show_nothing() -> None:
    found = compare(one_cell([1.0] * 4), one_cell([1.0] * 4)).cells[0]
    assert found.outcome is Outcome.SAME and found.visible == math.inf


def test_a_cell_with_little_to_lose_cannot_show_a_drop() -> None:
    def visible(scores: list[float], *, higher: bool = True) -> float:
        return compare(one_cell(scores, higher=higher), one_cell(scores)).cells[0].visible

    low = [1.0] * 5 + [0.0] * 95
    assert visible(low) == math.inf
    assert visible(low, higher=False) == pytest.approx(6 / 100)  # a rise has room enough
    assert visible([1.0] * 6 + [0.0] * 94) == pytest.approx(6 / 100)
    assert visible([0.2] * 20 + [0.0] * 80) == pytest.approx(0.04)  # all there is to lose


def test_noise_hides_drops() -> None:
    rng = np.random.default_rng(0)
    before, after = (rng.random(60).round().tolist() for _ in range(2))
    found = compare(one_cell(before), one_cell(after)).cells[0]
    assert found.visible > 1.5 * 6 / 60


def test_of_scores_without_bounds_nothing_is_known_while_nothing_differs() -> None:
    scores = [float(10 + i) for i in range(30)]
    assert math.isnan(compare(one_cell(scores), one_cell(scores)).cells[0].visible)


# --- what cannot be compared ----------------------------------------------------------------------


def test_a_cell_that_the_run_lacks_is_named_with_what_it_has_instead() -> None:
    found = compare(usual(), usual(budgets=("0.3",)))
    assert not found.complete and not found.failed
    missing = found.of(Outcome.NOT_COMPARED)
    assert len(missing) == 8 and len(found.of(Outcome.SAME)) == 2  # full has no budget
    assert {cell.reason for cell in missing} == {"not in the run, which has budget 0.3 instead"}
    assert found.extra == 4


def test_other_data_are_named_as_such() -> None:
    cells, samples = usual()
    other = cells["task"] == "vt"
    cells.loc[other, "data_hash"] = "cd" * 8
    cells.loc[other, "match"] = "x" + cells.loc[other, "match"]
    found = compare(usual(), (cells, samples))
    assert {c.reason for c in found.of(Outcome.NOT_COMPARED)} == {f"the task's data differ: {'ab' * 8} and {'cd' * 8}"}
    assert {c.pair.place.task for c in found.of(Outcome.NOT_COMPARED)} == {"vt"}


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("metric", "f1 (judge a)", "scored by string_match in the baseline and by f1 (judge a)"),
        ("versions", '{"generation": {"temperature": 0.6}}', "greedy in the baseline, temperature"),
        ("model", "elsewhere", "which has model elsewhere instead"),
        ("policy", "h2o", "not in the run"),
    ],
)
def test_what_else_keeps_cells_apart_is_named(column: str, value: str, says: str) -> None:
    cells, samples = usual()
    cells[column] = value if column != "policy" else cells["policy"].replace("snapkv", value)
    changed = cells["policy"] == "h2o" if column == "policy" else cells["match"] != ""
    cells.loc[changed, "match"] = "x" + cells.loc[changed, "match"]
    found = compare(usual(), (cells, samples))
    assert all(says in cell.reason for cell in found.of(Outcome.NOT_COMPARED))
    assert found.of(Outcome.NOT_COMPARED)


def test_a_cell_without_a_score_in_the_run_cannot_be_compared() -> None:
    broken = usual(failed=[("snapkv", "0.2", "vt")])
    found = compare(usual(), broken)
    (cell,) = found.of(Outcome.NOT_COMPARED)
    assert cell.reason == "the run has no score: RuntimeError: out of memory"
    assert not found.failed
    # What the baseline has no score of, it does not ask for.
    for run in (usual(), broken, without(usual(), policy="snapkv", budget="0.2", task="vt")):
        found = compare(broken, run)
        assert found.complete
        assert len(found.of(Outcome.NO_BASELINE)) == 1


def test_a_significant_drop_counts_whatever_else_is_missing() -> None:
    worse = rescored(without(usual(), policy="keydiff"), [0.0] * 40)
    found = compare(usual(), worse)
    assert found.failed and not found.complete


def test_runs_without_a_sample_in_common() -> None:
    cells, samples = usual()
    samples["sample_id"] = "other-" + samples["sample_id"]
    found = compare(usual(), (cells, samples))
    assert {cell.reason for cell in found.cells} == {"the two runs have no common samples"}
    assert not found.complete


def test_what_cells_were_made_with_is_compared() -> None:
    cells, samples = usual()
    cells["device"] = "cuda"
    cells["versions"] = '{"kvbench": "0.1.0", "torch": "2.14.0"}'
    assert compare(usual(), (cells, samples)).made == {
        "device": ("cpu", "cuda"),
        "torch": ("2.13.0", "2.14.0"),
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_drop": -1.0}, "--max-drop -1"),
        ({"max_drop": math.nan}, "--max-drop nan"),
        ({"alpha": 0.0}, "--alpha 0 "),
        ({"alpha": 1e-5}, "between 0.0001 and 1"),
        ({"alpha": 1.0}, "--alpha 1 "),
    ],
)
def test_limits_out_of_range(options: dict[str, float], says: str) -> None:
    with pytest.raises(UserError, match=says):
        compare(usual(), usual(), **options)


def test_a_run_that_measures_a_cell_twice_is_refused() -> None:
    cells, samples = usual()
    cells.loc[1, ["budget", "match"]] = ["0.4", "another"]
    with pytest.raises(UserError, match=r"the run measures vt, snapkv at 0\.4 twice"):
        compare(usual(), (cells, samples))


def test_a_sample_with_another_context_cannot_be_compared() -> None:
    cells, samples = usual()
    changed = samples.copy()
    row = changed.index[(changed["task"] == "vt") & (changed["policy"] == "snapkv")][4]
    changed.loc[row, "context_id"] = "another"
    problems = [pair.problem for pair in pair_cells((cells, samples), (cells, changed))]
    sample = samples.loc[row, "sample_id"]
    assert sorted(problems)[-2:] == [
        "",
        f"the task's data differ: sample {sample} has a different context",
    ]


def test_a_score_that_is_no_mean_is_not_compared() -> None:
    found = compare(unaveraged(usual(), "cwe"), unaveraged(usual(), "cwe"))
    missing = found.of(Outcome.NOT_COMPARED)
    assert len(missing) == 5 and {cell.pair.place.task for cell in missing} == {"cwe"}
    assert missing[0].reason == "string_match is not a mean over samples, so it has no paired test; use --metric"
    assert not found.complete and len(found.of(Outcome.SAME)) == 5
    assert {pair.place.task for pair in pair_with_full(unaveraged(usual(), "cwe"))} == {"vt"}


def test_the_fidelity_of_the_full_cache_to_itself_is_not_tested() -> None:
    cells, samples = usual()
    before = cells.assign(metric="kl", higher_is_better=False), samples.assign(score=3.5e-13)
    after = before[0], samples.assign(score=np.where(samples["policy"] == "full", 6.5e-5, 3.5e-13))
    found = compare(before, after)
    assert {comparison.pair.place.policy for comparison in found.cells} == {"snapkv", "keydiff"}
    assert found.complete and not found.failed
