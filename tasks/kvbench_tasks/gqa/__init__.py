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
IMAGES = Source(_DATASET, config="testdev_balanced_images", split="testdev", columns=("id", "image"))


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    questions = rows(QUESTIONS, cache_dir, samples)
    image_ids = {record["imageId"] for record in questions}
    image_records = rows(IMAGES, cache_dir, where=lambda record: record["id"] in image_ids)
    images = {record["id"]: record["image"] for record in image_records}
    return [{**record, "image": images[record["imageId"]]} for record in questions]


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
