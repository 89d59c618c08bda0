"""GQA (arXiv:1902.09506): compositional questions about real images. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

_DATASET = "lmms-lab-encoder/GQA"
QUESTIONS = Source(
    _DATASET,
    config="testdev_balanced_instructions",
    split="testdev",
    columns=("id", "imageId", "question", "answer"),
)
IMAGES = Source(
    _DATASET, config="testdev_balanced_images", split="testdev", columns=("id", "image")
)


def docs(leaf: str, *, cache_dir: Path, samples: int, **_: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    questions = rows(QUESTIONS, cache_dir, samples)
    wanted = {row["imageId"] for row in questions}
    found = rows(IMAGES, cache_dir, where=lambda row: row["id"] in wanted)
    images = {row["id"]: row["image"] for row in found}
    return [{**row, "image": images[row["imageId"]]} for row in questions]


BENCHMARK = Benchmark(
    name="gqa",
    leaves=("gqa",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Compositional questions about real images, answered in a word or phrase",
    source="https://cs.stanford.edu/people/dorarad/gqa (arXiv:1902.09506), asked as lmms-eval does",
    licence="CC-BY-4.0",
    sources={"gqa": (QUESTIONS, IMAGES)},
    harness="lmms_eval",
    metric="exact_match",
    media=("image",),
    sized=False,
    lexicons=("natural",),
)
