"""VideoMathQA (arXiv:2506.05349): mathematics explained on video. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

SOURCE = Source(
    "MBZUAI/VideoMathQA",
    config="mcq",
    columns=("question_id", "videoID", "question", "options", "answer", "category", "length"),
)


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [
        {**record, "extra": {"category": record["category"], "duration": record["length"]}}
        for record in rows(SOURCE, cache_dir, samples)
    ]


BENCHMARK = Benchmark(
    name="videomathqa",
    leaves=("videomathqa_mcq",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="2",  # 2: text after a video starts behind all three axes of its positions
    summary="Multiple-choice questions about mathematics explained on video",
    source="https://mbzuai-oryx.github.io/VideoMathQA/ (arXiv:2506.05349), asked as lmms-eval does",
    licence="see the card of the dataset",
    sources={"videomathqa_mcq": (SOURCE,)},
    harness="lmms_eval",
    metric="videomathqa_perception_score",
    chance=0.2,
    media=("video",),
    sized=False,
    lexicons=("natural",),
)
