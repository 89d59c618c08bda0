"""CoQA (arXiv:1808.07042): the last question of a conversation. See README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

SOURCE = Source(
    "EleutherAI/coqa",
    file="coqa_validation.parquet",
    columns=("id", "source", "story", "questions", "answers", "additional_answers"),
    revision="82e11af842af6c1396f5e9a5c7de260107c50cf1",
)


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [_doc(record) for record in rows(SOURCE, cache_dir)]


def _doc(record: Mapping[str, Any]) -> Doc:
    questions, answers = _texts(record["questions"]), _texts(record["answers"])
    history = "".join(
        f"Q: {question}\n\nA: {reply}\n\n" for question, reply in zip(questions[:-1], answers[:-1], strict=True)
    )
    annotations = record["additional_answers"] or {}
    references = [
        answers[-1],
        *(_texts(annotations[annotator])[-1] for annotator in sorted(annotations) if annotations[annotator]),
    ]
    unique_answers: dict[str, str] = {}
    for answer in references:
        unique_answers.setdefault(answer.lower(), answer)
    return {
        "context": f"{record['story']}\n\n{history}",
        "question": f"Q: {questions[-1]}\n\nA:",
        "outputs": list(unique_answers.values()),
        "extra": {"source": record["source"]},
    }


def _texts(column: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of all turns; the hub returns structs as columns or as rows."""
    if isinstance(column, Mapping):
        return list(column["input_text"])
    return [turn["input_text"] for turn in column]


BENCHMARK = Benchmark(
    name="coqa",
    leaves=("coqa",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="The last question of a conversation about a passage, after all earlier turns",
    source="https://stanfordnlp.github.io/coqa/ (arXiv:1808.07042), asked as lm-eval does",
    licence="MIT",
    sources={"coqa": (SOURCE,)},
    plain=frozenset({"coqa"}),
    metric="em",
    sized=False,
    lexicons=("natural",),
)
