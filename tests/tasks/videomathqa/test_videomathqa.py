"""VideoMathQA: lmms-eval's prompt and scorer, on videos where lmms-eval puts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvbench.data.sources import keep
from kvbench_tasks.videomathqa import BENCHMARK, SOURCE

from ... import lmms
from ...vision import load_task

ANSWERS = ("E", "The correct answer is B", "none of them")


def raw() -> list[dict[str, Any]]:
    return [
        {
            "question_id": str(i),
            "videoID": "vmq",
            "question": f"How long is it, {i}?",
            "options": ["A. 1", "B. 2", "C. 3", "D. 4", "E. 5"],
            "answer": gold,
            "category": "Chart",
            "length": "short",
        }
        for i, gold in enumerate("EBA")
    ]


@lmms.needs_videos
def test_it_is_asked_and_scored_as_lmms_eval_does(tmp_path: Path) -> None:
    lmms.write_video(Path(os.environ["HF_HOME"], "videomathqa", "videos", "vmq.mp4"))
    keep(SOURCE, raw(), tmp_path)
    task = load_task("videomathqa_mcq", BENCHMARK, tmp_path)
    own = lmms.evaluated("videomathqa/videomathqa_mcq.yaml", raw(), ANSWERS, tmp_path / "disk")
    scores = lmms.compare(task, BENCHMARK, own, ANSWERS)
    assert list(scores.values()) == [1, 1, 0]
    assert own.results["videomathqa_perception_score"] == pytest.approx(200 / 3)
    assert task.requests[0].extra == {"category": "Chart", "duration": "short"}
