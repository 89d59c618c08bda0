"""Video-MME: lmms-eval's prompt and scorer, on videos where lmms-eval puts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvbench.data.sources import keep
from kvbench.errors import LeftOut
from kvbench_tasks.videomme import BENCHMARK, SOURCE

from ... import lmms
from ...vision import load_task

ANSWERS = ("A", "The best answer is B.", "C")


def raw() -> list[dict[str, Any]]:
    return [
        {
            "video_id": "001",
            "duration": "short",
            "domain": "Knowledge",
            "sub_category": "Law",
            "url": "https://example.org",
            "videoID": video,
            "question_id": f"001-{i}",
            "task_type": "Counting Problem",
            "question": f"How many, {i}?",
            "options": ["A. one.", "B. two.", "C. three.", "D. four."],
            "answer": gold,
        }
        for i, (video, gold) in enumerate(zip(("vm1", "vm1", "vm2"), "ABD", strict=True))
    ]


@lmms.needs_videos
def test_it_is_asked_and_scored_as_lmms_eval_does(tmp_path: Path) -> None:
    folder = Path(os.environ["HF_HOME"], "videomme", "data")
    lmms.write_video(folder / "vm1.mp4")
    lmms.write_video(folder / "vm2.mp4", 40)
    keep(SOURCE, raw(), tmp_path)
    task = load_task("videomme", BENCHMARK, tmp_path)
    own = lmms.evaluated("videomme/videomme.yaml", raw(), ANSWERS, tmp_path / "disk")
    assert own.media == [[str(folder / f"{name}.mp4")] for name in ("vm1", "vm1", "vm2")]
    scores = lmms.compare(task, BENCHMARK, own, ANSWERS)
    assert list(scores.values()) == [1, 1, 0]
    assert own.results["videomme_perception_score"] == pytest.approx(200 / 3)
    # Both questions about the first video share its context.
    assert [(r.sample_id, r.question_id) for r in task.requests] == [("0", 0), ("0", 1), ("1", 0)]
    assert [len(task.requests[i].media[0].load()) for i in (0, 2)] == [8, 32]


@lmms.needs_videos
def test_a_missing_video_is_named(tmp_path: Path) -> None:
    keep(SOURCE, [{**raw()[0], "videoID": "none"}], tmp_path)
    with pytest.raises(LeftOut, match=r"data/none\.mp4; run .* lmms-eval/Video-MME"):
        load_task("videomme", BENCHMARK, tmp_path)
