"""TextVQA: lmms-eval's prompt and its accuracy over ten annotators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.data.sources import keep
from kvbench.harness.lmms_eval import _definition, _quiet
from kvbench_tasks.textvqa import BENCHMARK, OCR, SOURCE, WITH_OCR

from ... import lmms
from ...vision import encoded, load_task, picture

ANSWERS = ("nokia", "The two", "wrong")


def raw() -> list[dict[str, Any]]:
    golds = (["nokia"] * 10, ["2"] * 2 + ["two!"] + ["3"] * 7, ["right"] * 10)
    return [
        {
            "image_id": f"i{i}",
            "question_id": i,
            "question": "what brand is it?",
            "image": encoded(picture(color)),
            "answers": given,
            "ocr_tokens": ["NOKIA"],
        }
        for i, (color, given) in enumerate(zip(("red", "blue", "green"), golds, strict=True))
    ]


@lmms.needs_lmms_eval
def test_it_is_asked_and_scored_as_lmms_eval_does(tmp_path: Path) -> None:
    keep(SOURCE, raw(), tmp_path)
    task = load_task("textvqa_val", BENCHMARK, tmp_path)
    only = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    own = lmms.evaluated("textvqa/textvqa_val.yaml", raw(), ANSWERS, tmp_path / "disk", metric_list=only)
    scores = lmms.compare(task, BENCHMARK, own, ANSWERS)
    assert list(scores.values()) == pytest.approx([s["exact_match"] for s in own.samples])
    assert own.results["exact_match"] == pytest.approx(sum(scores.values()) / 3)
    assert scores[0] == 1
    assert 0 < scores[1] < 1
    assert task.requests[1].target == ("2", "2", "two!", *["3"] * 7)
    keys = {(r.sample_id, r.question_id, 0): ANSWERS[r.doc_id] for r in task.requests}
    assert task.score(keys) == task.score(keys)  # lmms-eval changes the rows that it scores


@lmms.needs_lmms_eval
def test_the_words_of_a_recogniser_follow_the_question(tmp_path: Path) -> None:
    rows = [{**row, "ocr_tokens": words} for row, words in zip(raw(), (["NOKIA", "5G"], [], ["a, b"]), strict=True)]
    keep(WITH_OCR, rows, tmp_path)
    task = load_task("textvqa_val_ocr", OCR, tmp_path)
    with _quiet():
        definition = _definition("textvqa/textvqa_val.yaml")
    own = lmms.evaluated(
        "textvqa/textvqa_val.yaml",
        rows,
        ANSWERS,
        tmp_path / "disk",
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        lmms_eval_specific_kwargs={"default": {**definition["lmms_eval_specific_kwargs"]["default"], "ocr": True}},
    )
    lmms.compare(task, OCR, own, ANSWERS)
    question = "What brand is it?\nReference OCR token: NOKIA, 5G\nAnswer the question using a single word or phrase."
    assert task.requests[0].question.startswith(question)
