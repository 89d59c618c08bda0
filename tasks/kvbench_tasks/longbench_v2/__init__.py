"""LongBench v2 (arXiv:2412.15204): 503 questions with four choices. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.longbench_v2.rows import SOURCE, rows


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return rows(cache_dir)


BENCHMARK = Benchmark(
    name="longbench_v2",
    leaves=("longbench_v2",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Hard questions with four choices over 8k to 2M words",
    source="https://github.com/THUDM/LongBench (arXiv:2412.15204)",
    licence="MIT AND Apache-2.0",
    sources={"longbench_v2": (SOURCE,)},
    metric="accuracy",
    chance=0.25,
    sized=False,
    lexicons=("natural",),
)
