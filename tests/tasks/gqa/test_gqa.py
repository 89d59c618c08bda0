"""GQA: lmms-eval's prompt and scorer; questions and images are two tables of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.data.sources import keep
from kvbench_tasks.gqa import BENCHMARK, IMAGES, QUESTIONS

from ... import lmms
from ...vision import encoded, load_task, picture

ANSWERS = ("Yes.", "the dog", "red")


def questions() -> list[dict[str, Any]]:
    golds = (("n1", "yes"), ("n2", "dog"), ("n1", "red"))
    return [
        {
            "id": f"q{i}",
            "imageId": image,
            "question": f"What is it, {i}?",
            "isBalanced": True,
            "answer": gold,
            "fullAnswer": f"It is {gold}.",
        }
        for i, (image, gold) in enumerate(golds)
    ]


def images() -> list[dict[str, Any]]:
    colors = {"n1": "red", "n2": "blue", "n3": "green"}
    return [{"id": name, "image": encoded(picture(color))} for name, color in colors.items()]


@lmms.needs_lmms_eval
def test_it_is_asked_and_scored_as_lmms_eval_does(tmp_path: Path) -> None:
    keep(QUESTIONS, questions(), tmp_path)
    keep(IMAGES, images(), tmp_path)
    task = load_task("gqa", BENCHMARK, tmp_path)
    by_id = {row["id"]: row["image"] for row in images()}
    joined = [{**row, "image": by_id[row["imageId"]]} for row in questions()]
    own = lmms.evaluated("gqa/gqa.yaml", joined, ANSWERS, tmp_path / "disk", process_docs=None)
    scores = lmms.compare(task, BENCHMARK, own, ANSWERS)
    assert list(scores.values()) == [s["exact_match"] for s in own.samples] == [1, 0, 1]
    assert own.results["exact_match"] == sum(scores.values()) / 3
    # Questions about one image share its context.
    ids = {r.doc_id: (r.sample_id, r.question_id) for r in task.requests}
    assert ids == {0: ("0", 0), 2: ("0", 1), 1: ("1", 0)}
    assert task.requests[0].media[0] is task.requests[1].media[0]
    assert {r.max_new_tokens for r in task.requests} == {16}
