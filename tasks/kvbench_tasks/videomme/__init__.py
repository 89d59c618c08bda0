"""Video-MME (arXiv:2405.21075): multiple-choice questions about videos. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

SOURCE = Source(
    "lmms-eval/Video-MME",
    columns=(
        "question_id",
        "videoID",
        "question",
        "options",
        "answer",
        "duration",
        "domain",
        "sub_category",
        "task_type",
    ),
)


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [
        {**record, "extra": {field: record[field] for field in ("duration", "domain", "task_type")}}
        for record in rows(SOURCE, cache_dir, samples)
    ]


BENCHMARK = Benchmark(
    name="videomme",
    leaves=("videomme",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="2",  # 2: text after a video starts behind all three axes of its positions
    summary="Multiple-choice questions about videos of 11 seconds to an hour, without subtitles",
    source="https://github.com/BradyFU/Video-MME (arXiv:2405.21075), asked as lmms-eval does",
    licence="academic research only",
    sources={"videomme": (SOURCE,)},
    harness="lmms_eval",
    metric="videomme_perception_score",
    chance=0.25,
    media=("video",),
    sized=False,
    lexicons=("natural",),
)
