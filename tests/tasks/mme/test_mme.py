"""MME: lmms-eval's prompt and scorer; a leaf each for perception and cognition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.data.sources import keep
from kvbench_tasks.mme import BENCHMARK, COGNITION, SOURCE

from ... import lmms
from ...vision import encoded, load_task, picture

ANSWERS = {"mme_perception": ("Yes.", "no", "y", "Not at all"), "mme_cognition": ("yes", "maybe")}


def raw() -> list[dict[str, Any]]:
    kinds = (("red", "existence"), ("blue", "code_reasoning"), ("green", "OCR"))
    return [
        {
            "question_id": f"{category}/{color}.png",
            "image": encoded(picture(color)),
            "question": f"Is it {color}? Please answer yes or no.",
            "answer": gold,
            "category": category,
        }
        for color, category in kinds
        for gold in ("Yes", "No")
    ]


@lmms.needs_lmms_eval
@pytest.mark.parametrize("leaf", BENCHMARK.leaves)
def test_it_is_asked_and_scored_as_lmms_eval_does(leaf: str, tmp_path: Path) -> None:
    keep(SOURCE, raw(), tmp_path)
    task = load_task(leaf, BENCHMARK, tmp_path)
    rows = [row for row in raw() if (row["category"] in COGNITION) == (leaf == "mme_cognition")]
    own = lmms.evaluated("mme/mme.yaml", rows, ANSWERS[leaf], tmp_path / "disk")
    scores = lmms.compare(task, BENCHMARK, own, ANSWERS[leaf])
    assert task.metric == f"{leaf}_score"
    assert list(scores.values()) == [s[task.metric]["score"] for s in own.samples]
    # Both questions about an image share its context.
    assert [r.question_id for r in task.requests] == [0, 1] * (len(rows) // 2)
    pairs = [(100 * (a + b) / 2) + 100 * (a + b == 2) for a, b in zip(*[iter(scores.values())] * 2, strict=True)]
    assert own.results[task.metric] == sum(pairs)  # every category has one image here
