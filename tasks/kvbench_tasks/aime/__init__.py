"""AIME 2024 and 2025: thirty problems each, answered several times. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench_tasks.maths.ask import ask

_SOURCES = {
    "aime24": Source("Maxwell-Jia/AIME_2024", split="train"),
    "aime25": Source("math-ai/aime25"),
}
# Fields of a row: problem name, statement, answer.
_FIELDS = {"aime24": ("ID", "Problem", "Answer"), "aime25": ("id", "problem", "answer")}


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    id_field, problem_field, answer_field = _FIELDS[leaf]
    return [
        ask(record[problem_field], str(record[answer_field]), id=str(record[id_field]))
        for record in rows(_SOURCES[leaf], cache_dir)
    ]


BENCHMARK = Benchmark(
    name="aime",
    leaves=tuple(_SOURCES),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Competition mathematics with integer answers: long reasoning, 64 answers a problem",
    source="https://huggingface.co/datasets/Maxwell-Jia/AIME_2024, .../math-ai/aime25",
    licence="MIT AND Apache-2.0",
    sources={leaf: (source,) for leaf, source in _SOURCES.items()},
    metric="accuracy",
    sized=False,
    lexicons=("natural",),
)
