"""MMMU-Pro, vision only (arXiv:2409.02813): the question is part of the image. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

SOURCE = Source("MMMU/MMMU_Pro", config="vision", columns=("id", "image", "options", "answer", "subject"))


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [{**record, "extra": {"subject": record["subject"]}} for record in rows(SOURCE, cache_dir, samples)]


BENCHMARK = Benchmark(
    name="mmmu_pro_vision",
    leaves=("mmmu_pro_vision",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Exam questions of 30 subjects with up to ten options, shown as screenshots and photos",
    source="https://github.com/MMMU-Benchmark/MMMU (arXiv:2409.02813), asked as lmms-eval does",
    licence="Apache-2.0",
    sources={"mmmu_pro_vision": (SOURCE,)},
    harness="lmms_eval",
    metric="mmmu_acc",
    media=("image",),
    sized=False,
    lexicons=("natural",),
)
