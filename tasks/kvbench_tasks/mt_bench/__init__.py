"""MT-Bench (arXiv:2306.05685): 80 questions in two turns, rated by a judge. See README.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench_tasks.mt_bench.metric import ask
from kvbench_tasks.mt_bench.questions import CATEGORIES, dialogue, stream

SOURCE = Source("HuggingFaceH4/mt_bench_prompts", split="train", columns=("category", "prompt", "reference"))


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """Return a dialogue for every question of a category; see `Benchmark.docs`."""
    return [dialogue(record) for record in rows(SOURCE, cache_dir) if f"mt_bench_{record['category']}" == leaf]


def stream_docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """Return one dialogue of all questions; see `Benchmark.docs`."""
    return [stream(rows(SOURCE, cache_dir))]


BENCHMARK = Benchmark(
    name="mt_bench",
    leaves=tuple(f"mt_bench_{category}" for category in CATEGORIES),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Open questions in two turns in eight categories, each answer rated by a judge, for moment turns",
    source="https://github.com/lm-sys/FastChat/tree/main/fastchat/llm_judge (arXiv:2306.05685)",
    licence="Apache-2.0",
    sources={f"mt_bench_{category}": (SOURCE,) for category in CATEGORIES},
    metric="rating",
    judge="mt_bench",
    ask=ask,
    sized=False,
    lexicons=("natural",),
)

STREAM = replace(
    BENCHMARK,
    name="mt_bench_stream",
    leaves=("mt_bench_stream",),
    docs=stream_docs,
    summary="All questions of MT-Bench as one dialogue of 160 turns, for moment turns",
    sources={"mt_bench_stream": (SOURCE,)},
)
