"""TextVQA (arXiv:1904.08920): questions about the text in an image. See README.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows

SOURCE = Source(
    "lmms-lab-encoder/textvqa",
    split="validation",
    columns=("question_id", "question", "image", "answers"),
)
WITH_OCR = replace(SOURCE, columns=(*SOURCE.columns, "ocr_tokens"))


def docs(leaf: str, *, cache_dir: Path, samples: int, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return rows(WITH_OCR if leaf == "textvqa_val_ocr" else SOURCE, cache_dir, samples)


BENCHMARK = Benchmark(
    name="textvqa",
    leaves=("textvqa_val",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Questions about the text in an image, answered in a word or phrase",
    source="https://textvqa.org (arXiv:1904.08920), asked as lmms-eval does",
    licence="CC-BY-4.0",
    sources={"textvqa_val": (SOURCE,)},
    harness="lmms_eval",
    metric="exact_match",
    media=("image",),
    sized=False,
    lexicons=("natural",),
)

OCR = replace(
    BENCHMARK,
    name="textvqa_ocr",
    leaves=("textvqa_val_ocr",),
    summary="TextVQA with the words of a text recogniser in the prompt, as LLaVA evaluates",
    source="https://textvqa.org (arXiv:1904.08920), asked as lmms-eval does with `ocr: true`",
    sources={"textvqa_val_ocr": (WITH_OCR,)},
)
