"""MME (arXiv:2306.13394): yes-or-no questions, two about each image. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

SOURCE = Source("lmms-lab-encoder/MME", columns=("question_id", "image", "question", "answer", "category"))

COGNITION = (
    "commonsense_reasoning",
    "numerical_calculation",
    "text_translation",
    "code_reasoning",
)
"""Categories of `mme_cognition`; all others belong to `mme_perception`."""


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""

    def is_selected(record: Doc) -> bool:
        return (record["category"] in COGNITION) == (leaf == "mme_cognition")

    return [
        {**record, "extra": {"category": record["category"]}}
        for record in rows(SOURCE, cache_dir, samples, is_selected)
    ]


BENCHMARK = Benchmark(
    name="mme",
    leaves=("mme_perception", "mme_cognition"),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Yes-or-no questions, two about each image, on perception and cognition",
    source="https://github.com/BradyFU/Awesome-Multimodal-Large-Language-Models/tree/Evaluation "
    "(arXiv:2306.13394), asked as lmms-eval does",
    licence="academic research only",
    sources={"mme_perception": (SOURCE,), "mme_cognition": (SOURCE,)},
    harness="lmms_eval",
    metric="mme_perception_score",
    chance=0.5,
    media=("image",),
    sized=False,
    lexicons=("natural",),
)
