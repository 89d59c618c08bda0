"""Many needles in a haystack: several values of several keys are asked for. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.synthetic.essays import ESSAYS
from kvbench_tasks.synthetic.fitting import HaystackPlan
from kvbench_tasks.synthetic.generate import generate
from kvbench_tasks.synthetic.lexicon import Lexicon, Niah

KEYS, VALUES, QUERIES = 8, 4, 4
"""Keys in the haystack, values per key, and keys asked for."""
ANSWER = 256
"""New tokens: 16 numbers of seven digits exceed RULER's 128 if every digit is a token."""


def docs(leaf: str, *, samples: int, lexicon: str, cache_dir: Path, **settings: Any) -> list[Doc]:
    """See `Benchmark.docs`. The reference model is asked for one key per row."""

    def plans(sample_lexicon: Lexicon, index: int) -> Sequence[HaystackPlan]:
        needle_plans = sample_lexicon.niah(Niah("essay", keys=KEYS, values=VALUES, queries=QUERIES))
        return needle_plans if lexicon == "reference" else [_roomier(plan) for plan in needle_plans]

    context_count = -(-samples // (QUERIES if lexicon == "reference" else 1))
    settings |= {"samples": context_count, "lexicon": lexicon, "essays_in": cache_dir}
    documents = generate(leaf, plans, **settings)
    return [{**document, **question} for document in documents for question in document.pop("each", [{}])][:samples]


def _roomier(plan: HaystackPlan) -> HaystackPlan:
    return replace(plan, build=lambda haystack_size: {**plan.build(haystack_size), "max_new_tokens": ANSWER})


BENCHMARK = Benchmark(
    name="niah_hard",
    leaves=("niah_hard",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    versions={"natural": {"niah_hard": "2"}},
    summary="32 needles, eight keys of four values each; all values of four keys are asked for",
    source="arXiv:2605.09649, appendix B.3, in RULER's words",
    licence="Apache-2.0",
    sources={"niah_hard": (ESSAYS,)},
    needs_hub=frozenset(),
    metric="string_match",
)
