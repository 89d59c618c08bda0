"""MATH-Vision (arXiv:2402.14804): competition problems with a drawing. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

COLUMNS = ("id", "question", "options", "decoded_image", "answer", "level", "subject")

SOURCES = {
    f"mathvision_{split}": Source("MathLLMs/MathVision", split=split, columns=COLUMNS)
    for split in ("test", "testmini")
}


def docs(leaf: str, *, cache_dir: Path, samples: int, **_: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [
        {**row, "extra": {"subject": row["subject"], "level": int(row["level"])}}
        for row in rows(SOURCES[leaf], cache_dir, samples)
    ]


BENCHMARK = Benchmark(
    name="mathvision",
    leaves=tuple(SOURCES),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Problems of mathematics competitions with a drawing, in 16 subjects and 5 levels",
    source="https://github.com/mathllm/MATH-V (arXiv:2402.14804), asked as lmms-eval does",
    licence="MIT",
    sources={leaf: (source,) for leaf, source in SOURCES.items()},
    harness="lmms_eval",
    metric="mathvision_standard_eval",
    media=("image",),
    sized=False,
    lexicons=("natural",),
)
