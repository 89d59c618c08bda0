"""MMStar: lmms-eval's prompt and scorer on rows in the hub's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.data.sources import keep
from kvbench_tasks.mmstar import BENCHMARK, SOURCE

from ... import lmms
from ...vision import encoded, load_task, picture

ANSWERS = ("B", "The answer is (A).", "I think it is C", "nothing")


def raw() -> list[dict[str, Any]]:
    kinds = (("math", "geometry"), ("math", "statistical reasoning")) * 2
    return [
        {
            "index": i,
            "question": f"How many? {i}\nOptions: A: 1, B: 2, C: 3, D: 4",
            "image": encoded(picture(color), "JPEG"),
            "answer": gold,
            "category": category,
            "l2_category": part,
            "meta_info": {"source": "x", "split": "val", "image_path": "x.jpg"},
        }
        for i, (color, gold, (category, part)) in enumerate(
            zip(("red", "blue", "green", "white"), "BBCD", kinds, strict=True)
        )
    ]


@lmms.needs_lmms_eval
def test_it_is_asked_and_scored_as_lmms_eval_does(tmp_path: Path) -> None:
    keep(SOURCE, raw(), tmp_path)
    task = load_task("mmstar", BENCHMARK, tmp_path)
    own = lmms.evaluated("mmstar/mmstar.yaml", raw(), ANSWERS, tmp_path / "disk")
    scores = lmms.compare(task, BENCHMARK, own, ANSWERS)
    assert list(scores.values()) == [s["average"]["score"] for s in own.samples]
    assert list(scores.values()) == [1, 0, 1, 0]
    assert own.results["average"] == 0.5  # of the means of geometry and of statistical reasoning
    assert task.requests[2].extra == {"category": "math", "l2_category": "geometry"}
    assert task.requests[0].target == ("B",)
