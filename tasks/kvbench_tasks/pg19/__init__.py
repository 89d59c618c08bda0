"""PG-19 (arXiv:1911.05507): how likely a book goes on, under eviction. See README.md."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source

SOURCE = Source(
    "emozilla/pg19",
    file="data/test-00000-of-00001-29a571947c0b5ccc.parquet",
    columns=("short_book_title", "publication_date", "text"),
    revision="c021754c8e01c5b1cc83a1f549c1f97fbbb756b8",
)


def docs(leaf: str, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    from kvbench_tasks.pg19.books import passages

    return passages(leaf, **options)


BENCHMARK = Benchmark(
    name="pg19",
    leaves=("pg19",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Negative log-likelihood of a book's next tokens, after its compressed beginning",
    source="https://github.com/google-deepmind/pg19 (arXiv:1911.05507)",
    licence="Apache-2.0",
    sources={"pg19": (SOURCE,)},
    needs_hub=frozenset({"pg19"}),
    plain=frozenset({"pg19"}),
    metric="nll_per_token",
    # Worse than a guess among 2^18 tokens is no language model.
    chance=18 * math.log(2),
    default_lengths=(1024,),
    lexicons=("natural",),
)

STREAM = replace(
    BENCHMARK,
    name="pg19_stream",
    leaves=("pg19_stream",),
    summary="Negative log-likelihood of a book as it streams by; for the moment decode",
    sources={"pg19_stream": (SOURCE,)},
    needs_hub=frozenset({"pg19_stream"}),
    plain=frozenset({"pg19_stream"}),
)
