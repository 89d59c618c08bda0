"""Needle in a haystack: one needle at eleven depths in turn. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.synthetic.essays import ESSAYS
from kvbench_tasks.synthetic.fitting import HaystackPlan
from kvbench_tasks.synthetic.generate import generate
from kvbench_tasks.synthetic.lexicon import Lexicon, Niah

DEPTHS = (0, 50, 100, 20, 70, 40, 90, 10, 60, 30, 80)
"""Percent of the haystack before the needle; sample i has the depth at index i modulo 11.

The order spreads the depths of a run with few samples: adjacent depths among the first three are at most 50 points
apart, among the first five 30 and among the first seven 20.
"""


def docs(leaf: str, *, cache_dir: Path, **settings: Any) -> list[Doc]:
    """See `Benchmark.docs`."""

    def plans(lexicon: Lexicon, index: int) -> Sequence[HaystackPlan]:
        return lexicon.niah(Niah("essay"), depths=[DEPTHS[index % len(DEPTHS)] / 100])

    documents = generate(leaf, plans, essays_in=cache_dir, **settings)
    return [
        {**document, "extra": {"depth": DEPTHS[sample_index % len(DEPTHS)]}}
        for sample_index, document in enumerate(documents)
    ]


BENCHMARK = Benchmark(
    name="niah",
    leaves=("niah_depth",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="2",
    versions={"natural": {"niah_depth": "3"}},
    summary="One needle at 0, 10, ..., 100 percent of the haystack, for a map of depth and length",
    source="https://github.com/gkamradt/LLMTest_NeedleInAHaystack, in RULER's words",
    licence="Apache-2.0",
    sources={"niah_depth": (ESSAYS,)},
    needs_hub=frozenset(),
    metric="string_match",
)
