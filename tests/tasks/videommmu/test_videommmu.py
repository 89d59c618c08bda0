"""Video-MMMU: lmms-eval's prompts and scorer, on videos where lmms-eval puts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvbench.data.sources import keep
from kvbench_tasks.videommmu import BENCHMARK, SOURCES

from ... import lmms
from ...vision import load_task

ANSWERS = ("The answer is B.", "It is 42.", "A")


def raw() -> list[dict[str, Any]]:
    kinds = (("multiple-choice", "B"), ("open", "42"), ("multiple-choice", "C"))
    return [
        {
            "id": f"validation_{subject}_{i}",
            "question": f"What follows from <image 1>, {i}?",
            "options": ["one", "two", "three"] if kind == "multiple-choice" else [],
            "answer": gold,
            "link_selected": "https://example.org",
            "question_type": kind,
        }
        for i, (subject, (kind, gold)) in enumerate(zip(("Art_Theory", "Math", "Music"), kinds, strict=True))
    ]


@lmms.needs_videos
@pytest.mark.parametrize("leaf", BENCHMARK.leaves)
def test_it_is_asked_and_scored_as_lmms_eval_does(leaf: str, tmp_path: Path) -> None:
    folder = Path(os.environ["HF_HOME"], "video_mmmu")
    for i, (subject, place) in enumerate((("Art_Theory", "Art"), ("Math", "Science"), ("Music", "Art"))):
        lmms.write_video(folder / place / f"validation_{subject}_{i}.mp4", 4 + i)
    keep(SOURCES[leaf], raw(), tmp_path)
    task = load_task(leaf, BENCHMARK, tmp_path)
    definition = f"videommmu/{leaf.removeprefix('video_mmmu_')}.yaml"
    own = lmms.evaluated(definition, raw(), ANSWERS, tmp_path / "disk")
    scores = lmms.compare(task, BENCHMARK, own, ANSWERS)
    assert list(scores.values()) == [1, 1, 0]
    assert own.results["mmmu_acc"] == round(2 / 3, 5)
    assert {r.max_new_tokens for r in task.requests} == {1024}
    assert len({r.context_id for r in task.requests}) == 3
