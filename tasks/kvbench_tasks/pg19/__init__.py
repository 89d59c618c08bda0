"""PG-19 (arXiv:1911.05507): the likelihood of a book under eviction. See README.md."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from kvbench.benchmark import Benchmark
from kvbench_tasks.pg19.books import SOURCE, passages

BENCHMARK = Benchmark(
    name="pg19",
    leaves=("pg19",),
    docs=passages,
    yaml=Path(__file__).parent,
    version="1",
    summary="Negative log-likelihood of a book's next tokens, after its compressed beginning",
    source="https://github.com/google-deepmind/pg19 (arXiv:1911.05507)",
    licence="Apache-2.0",
    sources={"pg19": (SOURCE,)},
    plain=frozenset({"pg19"}),
    metric="nll_per_token",
    # Chance level: a uniform guess among 2^18 tokens.
    chance=18 * math.log(2),
    lexicons=("natural",),
)

STREAM = replace(
    BENCHMARK,
    name="pg19_stream",
    leaves=("pg19_stream",),
    summary="Negative log-likelihood of a book as it streams by, for moment decode",
    sources={"pg19_stream": (SOURCE,)},
    plain=frozenset({"pg19_stream"}),
)
