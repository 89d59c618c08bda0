"""TruthfulQA (arXiv:2109.07958), generation: lm-eval's prompt and metrics. See README.md."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench_tasks.truthfulqa.metric import prepared

SOURCE = Source(
    "truthfulqa/truthful_qa",
    "generation",
    "validation",
    columns=("category", "question", "correct_answers", "incorrect_answers"),
    revision="741b8276f2d1982aa3d5b832d3ee81ed3b896490",
)


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    primer = files("kvbench_tasks.truthfulqa").joinpath("primer.txt").read_text(encoding="utf-8")
    documents = []
    for record in rows(SOURCE, cache_dir):
        prepared_record = prepared(record)
        prompt = f"{primer.rstrip()}\n\nQ: {prepared_record['question']}"
        # Only the last word of the question is read after the compression.
        question_start = prompt.rindex(" ")
        documents.append(
            {
                "context": prompt[:question_start],
                "question": prompt[question_start:],
                "outputs": prepared_record["correct_answers"],
                "correct_answers": prepared_record["correct_answers"],
                "incorrect_answers": prepared_record["incorrect_answers"],
                "extra": {"category": record["category"]},
            }
        )
    return documents


BENCHMARK = Benchmark(
    name="truthfulqa_gen",
    leaves=("truthfulqa_gen",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Answers that are nearer to true references than to false ones, after six examples",
    source="https://github.com/sylinrl/TruthfulQA (arXiv:2109.07958), asked as lm-eval does",
    licence="Apache-2.0",
    sources={"truthfulqa_gen": (SOURCE,)},
    plain=frozenset({"truthfulqa_gen"}),
    metric="bleu_acc",
    sized=False,
    lexicons=("natural",),
)
