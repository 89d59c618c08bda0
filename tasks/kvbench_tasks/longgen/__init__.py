"""Long answers: a list in order, a copied passage, a chain step by step. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.synthetic.fitting import HaystackPlan, Size
from kvbench_tasks.synthetic.generate import counter, generate
from kvbench_tasks.synthetic.lexicon import Lexicon


def docs(leaf: str, *, size: Size, **settings: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    count_tokens = counter(size)

    def plans(lexicon: Lexicon, index: int) -> Sequence[HaystackPlan]:
        if leaf == "longgen_list":
            return lexicon.listing(count_tokens)
        return lexicon.passage(count_tokens) if leaf == "longgen_copy" else lexicon.steps(count_tokens)

    return generate(leaf, plans, size=size, **settings)


BENCHMARK = Benchmark(
    name="longgen",
    leaves=("longgen_list", "longgen_copy", "longgen_chain"),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Answers far longer than a decode budget: a list, a copied passage, a chain's steps",
    source="ours (kvbench)",
    licence="Apache-2.0",
    metric="placed",
)
