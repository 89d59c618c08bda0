"""Facts: one fact stated in words in a natural text, asked for in a plain sentence. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.synthetic.generate import generate


def docs(leaf: str, **settings: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return generate(leaf, lambda lexicon, _: lexicon.fact(), **settings)


BENCHMARK = Benchmark(
    name="facts",
    leaves=("facts",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="One fact told in words among sentences of Python's manual: what heads are profiled on",
    source="ours (kvbench)",
    licence="Apache-2.0",
    metric="string_match",
)
