"""MATH-Vision (arXiv:2402.14804): competition problems with a drawing. See README.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

COLUMNS = ("id", "question", "options", "decoded_image", "answer", "level", "subject")


def _sources(prefix: str) -> dict[str, Source]:
    return {
        prefix + split_name: Source("MathLLMs/MathVision", split=split_name, columns=COLUMNS)
        for split_name in ("test", "testmini")
    }


SOURCES = _sources("mathvision_")
_LMMS_EVAL = _sources("mathvision_lmms_eval_")


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [
        {**record, "extra": {"subject": record["subject"], "level": int(record["level"])}}
        for record in rows({**SOURCES, **_LMMS_EVAL}[leaf], cache_dir, samples)
    ]


BENCHMARK = Benchmark(
    name="mathvision",
    leaves=tuple(SOURCES),
    docs=docs,
    yaml=Path(__file__).parent,
    version="2",
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

LMMS_EVAL = replace(
    BENCHMARK,
    name="mathvision_lmms_eval",
    leaves=tuple(_LMMS_EVAL),
    version="1",
    summary="MATH-Vision, scored by lmms-eval, which marks surds and multiples of pi as wrong",
    source="https://github.com/mathllm/MATH-V (arXiv:2402.14804), as lmms-eval has it",
    sources={leaf: (source,) for leaf, source in _LMMS_EVAL.items()},
)
