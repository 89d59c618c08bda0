"""Video-MMMU (arXiv:2501.13826): what a model learns from a lecture on video. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

_KINDS = ("adaptation", "comprehension")

SOURCES = {
    f"video_mmmu_{kind}": Source(
        "lmms-eval/VideoMMMU",
        config=kind.capitalize(),
        columns=("id", "question", "options", "answer", "question_type"),
    )
    for kind in _KINDS
}


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [
        {**record, "extra": {"question_type": record["question_type"]}}
        for record in rows(SOURCES[leaf], cache_dir, samples)
    ]


BENCHMARK = Benchmark(
    name="videommmu",
    leaves=tuple(SOURCES),
    docs=docs,
    yaml=Path(__file__).parent,
    version="2",  # 2: text after a video starts behind all three axes of its positions
    summary="Questions about lectures on video, and exam questions on what they teach",
    source="https://videommmu.github.io (arXiv:2501.13826), asked as lmms-eval does",
    licence="not stated",
    sources={leaf: (source,) for leaf, source in SOURCES.items()},
    harness="lmms_eval",
    metric="mmmu_acc",
    media=("video",),
    sized=False,
    lexicons=("natural",),
)
