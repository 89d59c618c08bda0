"""MATH-Vision: lmms-eval's prompt, and the scorers of the authors and of lmms-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.data.sources import keep
from kvbench.errors import LeftOut
from kvbench_tasks.mathvision import BENCHMARK, LMMS_EVAL, SOURCES
from kvbench_tasks.mathvision.metric import EQUAL

from ... import lmms
from ...vision import KINDS, encoded, load_task, picture

LEAF = "mathvision_testmini"
VARIANT = "mathvision_lmms_eval_testmini"
COLORS = ("red", "green", "blue", "white", "black")
ANSWERS = ("\\boxed{B}", "The answer is 3.", "so it is 7", "\\boxed{\\frac{1}{2}}", "(C).")


def raw() -> list[dict[str, Any]]:
    golds = ("B", "3", "2", "0.5", "C")
    return [
        {
            "id": str(i),
            "question": f"How many <image1> are there in {i}?",
            "options": ["one", "two", "three", "four", "five"] if gold in "BC" else [],
            "image": f"images/{i}.jpg",
            "decoded_image": encoded(picture(color)),
            "answer": gold,
            "solution": None,
            "level": i,
            "subject": "counting",
        }
        for i, (gold, color) in enumerate(zip(golds, COLORS, strict=True))
    ]


@lmms.needs_lmms_eval
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_asked_and_scored_as_lmms_eval_does(kind: str, tmp_path: Path) -> None:
    keep(SOURCES[LEAF], raw(), tmp_path)
    task = load_task(VARIANT, LMMS_EVAL, tmp_path, kind)
    own = lmms.evaluated("mathvision/mathvision_testmini.yaml", raw(), ANSWERS, tmp_path / "disk", kind)
    scores = lmms.compare(task, LMMS_EVAL, own, ANSWERS, kind)
    correct = [s["mathvision_standard_eval"]["scores"][0] for s in own.samples]
    assert list(scores.values()) == correct
    assert {0.0, 1.0} == set(correct)
    assert own.results["mathvision_standard_eval"] == pytest.approx(100 * sum(correct) / 5)
    first = task.requests[0]
    assert (first.max_new_tokens, first.until, first.target) == (16384, (), ("B",))
    assert first.extra == {"subject": "counting", "level": 0}
    assert (task.metric, task.higher_is_better) == ("mathvision_standard_eval", True)
    official = load_task(LEAF, BENCHMARK, tmp_path, kind)
    assert lmms.compare(official, BENCHMARK, own, ANSWERS, kind) == scores


@lmms.needs_lmms_eval
def test_surds_and_pi_are_right_as_the_authors_have_it_and_wrong_as_lmms_eval_has_it(
    tmp_path: Path,
) -> None:
    options = ["$2\\sqrt{3}$", "$4\\pi$", "$120^{\\circ}$", "no", "none"]
    rows = [{**row, "options": options, "answer": "ABC"[i]} for i, row in enumerate(raw()[:3])]
    keep(SOURCES[LEAF], rows, tmp_path)
    said = ("\\boxed{\\sqrt{12}}", "It is \\boxed{\\frac{8\\pi}{2}}", "\\boxed{120}")
    found = {}
    for leaf, bench in ((LEAF, BENCHMARK), (VARIANT, LMMS_EVAL)):
        task = load_task(leaf, bench, tmp_path)
        keys = {(r.sample_id, r.question_id, 0): said[r.doc_id] for r in task.requests}
        found[leaf] = list(task.score(keys)[0].values())
    assert found == {LEAF: [1, 1, 0], VARIANT: [0, 0, 1]}


@lmms.needs_lmms_eval
@pytest.mark.slow
def test_an_endless_expression_is_wrong_and_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(SOURCES[LEAF], raw(), tmp_path)
    task = load_task(LEAF, BENCHMARK, tmp_path)
    keys = {(r.sample_id, r.question_id, 0): ANSWERS[r.doc_id] for r in task.requests}
    scores, _ = task.score(keys)
    half = ("3", 0, 0)  # whose reference is a number, so that it is compared by value
    assert scores[half] == 1
    monkeypatch.setattr(EQUAL, "seconds", 2.0)
    assert task.score({**keys, half: "\\boxed{9^{9^{9^9}}}"})[0] == {**scores, half: 0}


@lmms.needs_lmms_eval
def test_fewer_samples_are_the_first_ones_of_the_same_data(tmp_path: Path) -> None:
    keep(SOURCES[LEAF], raw(), tmp_path)
    two, all_ = (load_task(LEAF, BENCHMARK, tmp_path, samples=n) for n in (2, 9))
    assert list(two.requests) == list(all_.requests)[:2]
    assert two.data_hash == all_.data_hash
    keep(SOURCES[LEAF], raw()[1:], tmp_path)
    assert load_task(LEAF, BENCHMARK, tmp_path).data_hash != two.data_hash


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LeftOut, match=r"MathLLMs/MathVision|lmms-eval"):
        load_task("mathvision_test", BENCHMARK, tmp_path)
