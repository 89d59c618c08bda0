"""MATH-500: problems of five levels and seven subjects. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench_tasks.maths.ask import ask

_SOURCE = Source("HuggingFaceH4/MATH-500")


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [
        ask(
            record["problem"],
            record["answer"],
            id=record["unique_id"],
            subject=record["subject"],
            level=int(record["level"]),
        )
        for record in rows(_SOURCE, cache_dir)
    ]


BENCHMARK = Benchmark(
    name="math_500",
    leaves=("math_500",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="2",
    summary="500 problems of the MATH test set, by subject and level, 8 answers a problem",
    source="https://huggingface.co/datasets/HuggingFaceH4/MATH-500 (arXiv:2103.03874)",
    licence="MIT",
    sources={"math_500": (_SOURCE,)},
    metric="accuracy",
    sized=False,
    lexicons=("natural",),
)
