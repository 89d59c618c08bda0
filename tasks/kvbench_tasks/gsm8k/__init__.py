"""GSM8K: zero-shot with a boxed answer, and lm-eval's five examples. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source

_TEST = Source("openai/gsm8k", "main", "test")
_TRAIN = Source("openai/gsm8k", "main", "train")
_SHOTS = 5


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    from kvbench.data.sources import rows
    from kvbench_tasks.maths.ask import ask

    return [ask(row["question"], _final(row)) for row in rows(_TEST, cache_dir)]


def fewshot_docs(leaf: str, *, seed: int, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`. Both leaves ask the same; every question has examples of its own."""
    from kvbench.data.sources import rows
    from kvbench_tasks.fitting import Streams

    train = rows(_TRAIN, cache_dir)
    found = []
    for i, row in enumerate(rows(_TEST, cache_dir)):
        shots = Streams("gsm8k_fewshot", seed, i)["examples"].sample(train, _SHOTS)
        examples = [f"Question: {s['question']}\nAnswer: {s['answer']}\n\n" for s in shots]
        found.append(
            {
                "context": "".join(examples),
                "question": f"Question: {row['question']}\nAnswer:",
                "outputs": [_final(row)],
                "solution": row["answer"],
            }
        )
    return found


def _final(row: Doc) -> str:
    """What a solution of the data set ends with."""
    return str(row["answer"]).rsplit("####", 1)[-1].strip().replace(",", "")


def _fewshot(leaf: str, kind: str, summary: str) -> Benchmark:
    return Benchmark(
        name=leaf,
        leaves=(leaf,),
        docs=fewshot_docs,
        yaml=Path(__file__).parent,
        version="1",
        summary=summary,
        source="https://huggingface.co/datasets/openai/gsm8k; prompt and metric of lm-eval 0.4.13",
        licence="MIT",
        sources={leaf: (_TEST, _TRAIN)},
        needs_hub=frozenset({leaf}),
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
    needs_hub=frozenset({"gsm8k"}),
    metric="accuracy",
    sized=False,
    lexicons=("natural",),
)
FEWSHOT = _fewshot(
    "gsm8k_fewshot", "flexible-extract", "GSM8K with five examples, scored by the last number"
)
STRICT = _fewshot(
    "gsm8k_strict", "strict-match", "GSM8K with five examples, scored by what follows ####"
)
