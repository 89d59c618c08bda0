"""LongBench v2's raw rows as rows of a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc, Source
from kvbench.data import sources

SOURCE = Source(
    "zai-org/LongBench-v2",
    split="train",
    columns=(
        "_id",
        "domain",
        "sub_domain",
        "difficulty",
        "length",
        "question",
        "choice_A",
        "choice_B",
        "choice_C",
        "choice_D",
        "answer",
        "context",
    ),
    revision="2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
)

CONTEXT = "Please read the following text and answer the question below.\n\n<text>\n{}\n</text>\n\n"

QUESTION = (
    "What is the correct answer to this question: {question}\n"
    "Choices:\n(A) {choice_A}\n(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)

ASKED = ("question", "choice_A", "choice_B", "choice_C", "choice_D")


def rows(cache_dir: Path) -> list[Doc]:
    """Return all rows in the dataset's order; see `Benchmark.docs`."""
    return [_row(record) for record in sources.rows(SOURCE, cache_dir)]


def _row(record: dict[str, Any]) -> Doc:
    grouping_fields = ("domain", "sub_domain", "difficulty", "length")
    return {
        "context": CONTEXT.format(record["context"].strip()),
        "question": QUESTION.format(**{field: record[field].strip() for field in ASKED}),
        "outputs": [record["answer"]],
        "extra": {**{field: record[field] for field in grouping_fields}, "id": record["_id"]},
    }
