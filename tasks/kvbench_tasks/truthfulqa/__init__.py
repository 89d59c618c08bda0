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


def docs(leaf: str, *, cache_dir: Path, **_: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    primer = files("kvbench_tasks.truthfulqa").joinpath("primer.txt").read_text(encoding="utf-8")
    made = []
    for row in rows(SOURCE, cache_dir):
        ready = prepared(row)
        prompt = f"{primer.rstrip()}\n\nQ: {ready['question']}"
        # The last word of the question is read after the compression: nothing else follows it.
        cut = prompt.rindex(" ")
        made.append(
            {
                "context": prompt[:cut],
                "question": prompt[cut:],
                "outputs": ready["correct_answers"],
                "correct_answers": ready["correct_answers"],
                "incorrect_answers": ready["incorrect_answers"],
                "extra": {"category": row["category"]},
            }
        )
    return made


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
