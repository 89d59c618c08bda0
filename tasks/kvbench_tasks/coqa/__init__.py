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


def docs(leaf: str, *, cache_dir: Path, **_: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [_doc(row) for row in rows(SOURCE, cache_dir)]


def _doc(row: Mapping[str, Any]) -> Doc:
    questions, answers = _texts(row["questions"]), _texts(row["answers"])
    history = "".join(
        f"Q: {asked}\n\nA: {said}\n\n"
        for asked, said in zip(questions[:-1], answers[:-1], strict=True)
    )
    others = row["additional_answers"] or {}
    given = [answers[-1], *(_texts(others[name])[-1] for name in sorted(others) if others[name])]
    distinct: dict[str, str] = {}
    for answer in given:
        distinct.setdefault(answer.lower(), answer)
    return {
        "context": f"{row['story']}\n\n{history}",
        "question": f"Q: {questions[-1]}\n\nA:",
        "outputs": list(distinct.values()),
        "extra": {"source": row["source"]},
    }


def _texts(field: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of all turns; the hub gives a table of structs as columns or as rows."""
    if isinstance(field, Mapping):
        return list(field["input_text"])
    return [one["input_text"] for one in field]


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
