"""MMStar (arXiv:2403.20330): multiple-choice questions that need their image. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

SOURCE = Source(
    "Lin-Chen/MMStar",
    split="val",
    columns=("index", "question", "image", "answer", "category", "l2_category"),
)


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [
        {**record, "extra": {"category": record["category"], "l2_category": record["l2_category"]}}
        for record in rows(SOURCE, cache_dir, samples)
    ]


BENCHMARK = Benchmark(
    name="mmstar",
    leaves=("mmstar",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Multiple-choice questions that cannot be answered without their image",
    source="https://github.com/MMStar-Benchmark/MMStar (arXiv:2403.20330), asked as lmms-eval does",
    licence="not stated",
    sources={"mmstar": (SOURCE,)},
    harness="lmms_eval",
    metric="average",
    chance=0.25,
    media=("image",),
    sized=False,
    lexicons=("natural",),
)
