"""Dialogue: facts stated over several turns and asked for in the same turn or later. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.synthetic.generate import generate

TURNS = 6
FACTS = 3
"""New facts per turn."""


def docs(leaf: str, **settings: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return generate(leaf, lambda lexicon, _: lexicon.dialogue(TURNS, FACTS), **settings)


BENCHMARK = Benchmark(
    name="dialogue",
    leaves=("dialogue",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Facts told over six turns; each turn asks for one of its own or of an earlier turn",
    source="ours (kvbench)",
    licence="Apache-2.0",
    metric="string_match",
)
