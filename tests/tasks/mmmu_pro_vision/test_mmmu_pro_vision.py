"""MMMU-Pro, vision only: lmms-eval's prompt and scorer on rows in the hub's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.data.sources import keep
from kvbench_tasks.mmmu_pro_vision import BENCHMARK, SOURCE

from ... import lmms
from ...vision import encoded, load_task, picture

ANSWERS = ("J", "A", "The answer is B.")


def raw() -> list[dict[str, Any]]:
    subjects = ("Accounting", "Art", "Accounting")
    return [
        {
            "id": f"test_{subject}_{i}",
            "image": encoded(picture(color)),
            "options": "['one', 'two', 'three', 'four']",
            "answer": gold,
            "subject": subject,
        }
        for i, (color, gold, subject) in enumerate(zip(("red", "blue", "green"), "JBB", subjects, strict=True))
    ]


@lmms.needs_lmms_eval
def test_it_is_asked_and_scored_as_lmms_eval_does(tmp_path: Path) -> None:
    keep(SOURCE, raw(), tmp_path)
    task = load_task("mmmu_pro_vision", BENCHMARK, tmp_path)
    own = lmms.evaluated("mmmu_pro/mmmu_pro_vision.yaml", raw(), ANSWERS, tmp_path / "disk")
    scores = lmms.compare(task, BENCHMARK, own, ANSWERS)
    assert list(scores.values()) == [1, 0, 0]  # lmms-eval wants the bare letter
    assert own.results["mmmu_acc"] == round(sum(scores.values()) / 3, 5)
    assert task.requests[1].extra == {"subject": "Art"}
    assert task.requests[1].max_new_tokens == 256
