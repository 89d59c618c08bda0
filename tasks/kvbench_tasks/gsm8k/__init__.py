"""GSM8K: zero-shot with a boxed answer, and with lm-eval's five examples. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench_tasks.maths.ask import ask
from kvbench_tasks.synthetic.fitting import Streams

_TEST = Source("openai/gsm8k", "main", "test")
_TRAIN = Source("openai/gsm8k", "main", "train")
_SHOTS = 5


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return [ask(record["question"], _final_number(record)) for record in rows(_TEST, cache_dir)]


def fewshot_docs(leaf: str, *, seed: int, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`. Both tasks ask the same questions, each with its own examples."""
    train_records = rows(_TRAIN, cache_dir)
    documents = []
    for question_index, record in enumerate(rows(_TEST, cache_dir)):
        examples = Streams("gsm8k_fewshot", seed, question_index)["examples"].sample(train_records, _SHOTS)
        shots = [
            {"user": _format_question(example), "assistant": example["answer"], "end": "\n\n"} for example in examples
        ]
        documents.append(
            {
                "shots": shots,
                "context": "",
                "question": _format_question(record),
                "outputs": [_final_number(record)],
                "solution": record["answer"],
            }
        )
    return documents


def _format_question(record: Doc) -> str:
    return f"Question: {record['question']}\nAnswer:"


def _final_number(record: Doc) -> str:
    """Return the number at the end of a data set solution."""
    return str(record["answer"]).rsplit("####", 1)[-1].strip().replace(",", "")


def _fewshot(leaf: str, kind: str, summary: str) -> Benchmark:
    return Benchmark(
        name=leaf,
        leaves=(leaf,),
        docs=fewshot_docs,
        yaml=Path(__file__).parent,
        version="2",
        summary=summary,
        source="https://huggingface.co/datasets/openai/gsm8k; prompt and metric of lm-eval 0.4.13",
        licence="MIT",
        sources={leaf: (_TEST, _TRAIN)},
        metric=f"exact_match,{kind}",
        sized=False,
        lexicons=("natural",),
    )


BENCHMARK = Benchmark(
    name="gsm8k",
    leaves=("gsm8k",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Grade-school word problems, zero-shot reasoning, 8 answers a problem",
    source="https://huggingface.co/datasets/openai/gsm8k (arXiv:2110.14168)",
    licence="MIT",
    sources={"gsm8k": (_TEST,)},
    metric="accuracy",
    sized=False,
    lexicons=("natural",),
)
FEWSHOT = _fewshot("gsm8k_fewshot", "flexible-extract", "GSM8K with five examples, scored by the last number")
STRICT = _fewshot("gsm8k_strict", "strict-match", "GSM8K with five examples, scored by what follows ####")
