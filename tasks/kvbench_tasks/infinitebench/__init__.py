"""InfiniteBench (arXiv:2402.13718): eleven sets of about 100k tokens a context. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source

SETS = (
    "passkey",
    "number_string",
    "kv_retrieval",
    "longbook_sum_eng",
    "longbook_qa_eng",
    "longbook_choice_eng",
    "longdialogue_qa_eng",
    "math_find",
    "math_calc",
    "code_debug",
    "code_run",
)
"""The sets; a leaf is called `infinitebench_` and the set's name."""


def source(name: str) -> Source:
    """A set's table, as the raw file: answers are of another type in each."""
    return Source(
        "xinrongzhang2022/InfiniteBench",
        file=f"{name}.jsonl",
        columns=("id", "context", "input", "answer", "options"),
        revision="90f0394333616266d9fe85824ceaf505093cbaa5",
    )


def docs(leaf: str, *, cache_dir: Path, **_: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    from kvbench_tasks.infinitebench.rows import rows

    return rows(leaf.removeprefix("infinitebench_"), cache_dir)


BENCHMARK = Benchmark(
    name="infinitebench",
    leaves=tuple(f"infinitebench_{name}" for name in SETS),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Retrieval, novels, dialogue, mathematics and code over about 100k tokens",
    source="https://github.com/OpenBMB/InfiniteBench (arXiv:2402.13718)",
    licence="MIT AND Apache-2.0",
    sources={f"infinitebench_{name}": (source(name),) for name in SETS},
    needs_hub=frozenset(f"infinitebench_{name}" for name in SETS),
    chance={"infinitebench_longbook_choice_eng": 0.25, "infinitebench_code_debug": 0.25},
    sized=False,
    lexicons=("natural",),
)
