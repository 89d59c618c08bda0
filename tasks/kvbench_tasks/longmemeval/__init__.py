"""LongMemEval_S (arXiv:2410.10813): a question about many earlier chats. See README.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench_tasks.longmemeval.chats import alternating, asked
from kvbench_tasks.longmemeval.metric import ask

SOURCE = Source(
    "xiaowu0162/longmemeval-cleaned",
    file="longmemeval_s_cleaned.json",
    columns=(
        "question_id",
        "question_type",
        "question",
        "answer",
        "question_date",
        "haystack_dates",
        "haystack_sessions",
    ),
)


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [asked(record, notes=leaf.endswith("_con")) for record in alternating(rows(SOURCE, cache_dir))]


BENCHMARK = Benchmark(
    name="longmemeval",
    leaves=("longmemeval_s",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="2",
    summary="Questions about a history of some 40 chats, in six types",
    source="https://github.com/xiaowu0162/LongMemEval (arXiv:2410.10813)",
    licence="MIT",
    sources={"longmemeval_s": (SOURCE,)},
    metric="accuracy",
    judge="longmemeval",
    ask=ask,
    sized=False,
    lexicons=("natural",),
)

NOTES = replace(
    BENCHMARK,
    name="longmemeval_con",
    leaves=("longmemeval_s_con",),
    summary="LongMemEval, answered step by step: first what is relevant, then the answer",
    sources={"longmemeval_s_con": (SOURCE,)},
)
