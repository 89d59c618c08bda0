"""Two policies of one run, compared question by question."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kvbench.errors import UserError
from kvbench.regression.policies import PolicyComparison, compare_policies
from kvbench.regression.show_policies import PolicyPair, as_records, latex_document, notes, sentence, tables
from kvbench.regression.significance import holm, paired_p
from kvbench.report.against import differences
from kvbench.report.frames import prepare
from kvbench.tables.outputs import plain_text

from ..report.conftest import Frames, make_run, unaveraged
from .conftest import POLICIES, rescored, usual, without

BASE, POLICY = POLICIES
PAIR = PolicyPair(BASE, POLICY, labels={BASE: "SnapKV", POLICY: "Ours"})


def compared(frames: Frames, **options: float) -> PolicyComparison:
    (comparison,) = compare_policies(prepare(*frames), BASE, POLICY, **options)
    return comparison


def scores_of(frames: Frames, policy: str, **columns: str) -> dict[tuple[str, int, int], float]:
    samples = frames[1][frames[1]["policy"] == policy]
    for name, value in columns.items():
        samples = samples[samples[name] == value]
    keys = zip(samples["sample_id"], samples["question_id"], samples["repeat"], strict=True)
    return dict(zip(keys, samples["score"], strict=True))


def test_means_of_a_budget_are_those_of_a_report() -> None:
    frames = usual()
    reported = differences(prepare(*frames).cells, frames[1], BASE).set_index("budget")
    means = [part for part in compared(frames).parts if len(part.tasks) > 1]
    assert [part.budgets for part in means] == [["0.2"], ["0.4"]]
    for part in means:
        row = reported.loc[part.budgets[0]]
        assert (part.base_score, part.score) == pytest.approx((row["base_score"], row["score"]))
        bounds = (part.change.mean, part.change.lo, part.change.hi)
        assert bounds == pytest.approx((row["diff"], row["diff_lo"], row["diff_hi"]))


def test_p_is_that_of_the_paired_test_corrected_for_all_parts_that_differ() -> None:
    frames = usual()
    comparison = compared(frames)
    for part in comparison.parts:
        if len(part.tasks) == 1:
            place = {"task": part.tasks[0], "budget": part.budgets[0]}
            ours, theirs = scores_of(frames, POLICY, **place), scores_of(frames, BASE, **place)
            assert part.p == pytest.approx(paired_p(ours, theirs, {key: key[0] for key in ours}))
    differing = [part for part in comparison.parts if part.differs]
    corrected = [part.p_corrected for part in differing]
    assert len(differing) == 6 and corrected == pytest.approx(holm([part.p for part in differing]))
    assert comparison.overall.family_size == 1 and comparison.overall.p_corrected == comparison.overall.p


def test_the_overall_difference_averages_a_question_over_budgets_before_it_is_paired() -> None:
    frames = usual()
    overall = compared(frames).overall
    assert overall.tasks == ("vt", "cwe") and overall.budgets == ["0.2", "0.4"]
    assert overall.contexts == 80  # not 160: a context counts once, however many budgets it was answered at
    means = [part for part in compared(frames).parts if len(part.tasks) > 1]
    assert overall.change.mean == pytest.approx(np.mean([part.change.mean for part in means]))


def test_a_part_in_which_nothing_differs_is_no_test() -> None:
    frames = usual(tasks=("vt",))
    same = list(scores_of(frames, POLICY, budget="0.2").values())
    comparison = compared(rescored(frames, same, policy=BASE, budget="0.2"))
    assert [part.differs for part in comparison.parts] == [False, True]
    assert {part.family_size for part in comparison.parts} == {1}


def test_several_benchmarks_are_one_family_of_overall_differences() -> None:
    cells, samples = usual()
    cells["group"] = cells["task"]
    comparisons = compare_policies(prepare(cells, samples), BASE, POLICY)
    assert [comparison.overall.family_size for comparison in comparisons] == [2, 2]
    assert "Holm-corrected for 2 comparisons" in plain_text(sentence(comparisons[0], PAIR))


def decided(sign: float = 1.0, samples: int = 40) -> PolicyComparison:
    """One cell in which every second answer differs, in one direction."""
    frames = usual(samples, tasks=("vt",), budgets=("0.2",))
    changed = [float(sign > 0 and index % 2 == 0) for index in range(samples)]
    other = [float(sign < 0 and index % 2 == 0) for index in range(samples)]
    return compared(rescored(rescored(frames, changed, policy=POLICY), other, policy=BASE))


@pytest.mark.parametrize(("sign", "direction"), [(1.0, "higher"), (-1.0, "lower")])
def test_the_sentence_gives_difference_interval_p_and_contexts(sign: float, direction: str) -> None:
    text = plain_text(sentence(decided(sign), PAIR))
    assert text.startswith("On vt (model reference, budget 0.2, moment context, 1024 tokens), Ours scores 50.0 points")
    assert f"{direction} than SnapKV (" in text and "p < 0.001, paired permutation test over 40 contexts)." in text


def test_an_undecided_difference_is_called_undecided() -> None:
    few = plain_text(sentence(decided(samples=4), PAIR))
    assert "is undecided" in few and "fewer than 6 contexts cannot show any difference" in few
    assert "higher than" not in few
    frames = usual(tasks=("vt",), budgets=("0.2",))
    nearly_same = [1 - score if index < 2 else score for index, score in enumerate(scores_of(frames, POLICY).values())]
    many = plain_text(sentence(compared(rescored(frames, nearly_same, policy=BASE)), PAIR))
    assert "is undecided" in many and "cannot show" not in many


def test_policies_that_score_the_same_are_said_to_score_the_same() -> None:
    frames = usual(tasks=("vt",), budgets=("0.2",))
    same = compared(rescored(frames, list(scores_of(frames, POLICY).values()), policy=BASE))
    assert "Ours and SnapKV score the same on every question" in plain_text(sentence(same, PAIR))


def test_lower_can_be_better() -> None:
    frames = usual(tasks=("vt",), budgets=("0.2",))
    frames[0]["higher_is_better"] = False
    scores = [float(index % 2) for index in range(40)]
    comparison = compared(rescored(rescored(frames, [0.0] * 40, policy=POLICY), scores, policy=BASE))
    assert "lower than SnapKV, which is better" in plain_text(sentence(comparison, PAIR))


def test_what_is_left_out_is_named() -> None:
    frames = usual(tasks=("vt", "cwe", "fwe"))
    cells, samples = unaveraged(frames, "cwe")
    cells.loc[cells["task"] == "fwe", "discriminative"] = False
    cells, samples = without((cells, samples), task="vt", policy=POLICY, budget="0.4")
    comparison = compared((cells, samples))
    assert (comparison.overall.tasks, comparison.overall.budgets) == (("vt",), ["0.2"])
    text = "\n".join(notes([comparison], PAIR))
    assert "Left out: fwe; the full cache is not above chance." in text
    assert "Left out: cwe; the score is not a mean over samples" in text
    assert "Left out of ruler: 0.4 (context); not every task has a common score there." in text


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        (unaveraged(usual(tasks=("vt",)), "vt"), "not a mean over samples, so it has no paired test; use --metric"),
        (
            without(usual(), policy=POLICY, task="vt"),
            "have no common budget and moment with scores of all tasks at the same seed; --task",
        ),
    ],
)
def test_runs_without_a_comparison_are_refused(frames: Frames, says: str) -> None:
    with pytest.raises(UserError, match=says):
        compared(frames)


def test_tasks_of_different_scale_have_no_mean() -> None:
    cells, samples = usual()
    cells.loc[cells["task"] == "vt", "score"] = 3.0
    with pytest.raises(UserError, match="differ in scale or direction"):
        compared((cells, samples))


@pytest.mark.parametrize(
    ("base", "policy", "says"),
    [("snapvk", POLICY, "did you mean snapkv"), (BASE, BASE, "with itself"), ("full", POLICY, "full has no budget")],
)
def test_policies_that_cannot_be_compared_are_refused(base: str, policy: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        compare_policies(prepare(*usual()), base, policy)


def test_latex_has_the_sentence_before_the_table() -> None:
    text = latex_document([decided(-1.0)], PAIR)
    packages, first, _, rest = text.split("\n", 3)
    assert packages == r"% \usepackage{booktabs,graphicx}"
    assert r"On \texttt{vt}" in first and "50.0 points lower" in first and "$-$" in first
    assert rest.startswith(r"\begin{table*}") and "undecided" not in rest


def test_records_have_every_number_and_the_sentence() -> None:
    comparison = compared(usual())
    (record,) = as_records([comparison], PAIR)
    assert record["sentence"] == plain_text(sentence(comparison, PAIR))
    assert record["overall"]["diff"] == comparison.overall.change.mean
    assert len(record["parts"]) == len(comparison.parts) == len(tables([comparison], PAIR)[0].rows) - 1


def test_decided_differences_in_both_directions_are_pointed_out() -> None:
    comparison = decided()
    both = replace(comparison, parts=(comparison.overall, decided(-1.0).overall))
    assert any("go both ways" in note for note in notes([both], PAIR))
    assert not any("go both ways" in note for note in notes([comparison], PAIR))


def test_two_runs_are_paired_by_question() -> None:
    first, second = usual(policies=(BASE,)), usual(policies=(POLICY,), with_full=False)
    together = tuple(pd.concat(frames, ignore_index=True) for frames in zip(first, second, strict=True))
    both = compared(make_run(policies=POLICIES, budgets=("0.2", "0.4"), tasks=("vt", "cwe"), samples=40))
    assert compared(together).overall == both.overall  # type: ignore[arg-type]


def test_an_informed_policy_is_marked_everywhere() -> None:
    frames = usual(policies=("snapkv", "oracle"), tasks=("vt",), budgets=("0.2",))
    comparisons = compare_policies(prepare(*frames), "snapkv", "oracle")
    (record,) = as_records(comparisons, pair := PolicyPair("snapkv", "oracle", labels={"oracle": "Oracle"}))
    assert "Oracle (informed)" in record["sentence"] and record["informed"] == ["oracle"]
    (table,) = tables(comparisons, pair)
    assert plain_text(table.title).startswith("Oracle (informed) minus snapkv ·")
    assert plain_text(table.columns[4].title) == "Oracle (informed)"


def test_a_metric_of_fidelity_is_named_with_its_unit() -> None:
    frames = usual(tasks=("vt",), budgets=("0.2",))
    frames = rescored(rescored(frames, [0.1] * 40, policy=POLICY), [0.6] * 40, policy=BASE)
    comparison = compared((frames[0].assign(metric="kl", higher_is_better=False), frames[1]))
    text = plain_text(sentence(comparison, PAIR))
    assert "the KL of Ours is 0.5000 nats lower than that of SnapKV, which is better (0.1000 vs" in text
    (table,) = tables([comparison], PAIR)
    assert plain_text(table.title).endswith(", KL, nats, lower is better")
    few = plain_text(sentence(replace(comparison, overall=replace(comparison.overall, p_corrected=0.5)), PAIR))
    assert "the difference in KL between Ours and SnapKV is undecided (" in few and "0.5000 nats;" in few
