"""SCBench (arXiv:2412.10319): several questions about one long context. See README.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench_tasks.scbench.loader import dialogues, requests

NAMES = (
    "kv",
    "prefix_suffix",
    "vt",
    "repoqa",
    "qa_eng",
    "qa_chn",
    "choice_eng",
    "many_shot",
    "mf",
    "summary",
    "summary_with_needles",
    "repoqa_and_kv",
)

SOURCES = {
    name: Source(
        "microsoft/SCBench",
        file=f"data/scbench_{name}.jsonl",
        revision="283310bb8c5ba6909dd9a6b1be087d2937f76f6d",
    )
    for name in NAMES
}
"""Tables by task name."""


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`: dialogues for `scbench_NAME`, plain rows for `scdq_NAME`."""
    mode, task_name = leaf.split("_", 1)
    records = rows(SOURCES[task_name], cache_dir)
    build = dialogues if mode == "scbench" else requests
    return build(f"scbench_{task_name}", records)


BENCHMARK = Benchmark(
    name="scbench",
    leaves=tuple(f"scbench_{name}" for name in NAMES),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Several questions in turn about one long context (multi-turn mode)",
    source="https://github.com/microsoft/MInference/tree/main/scbench (arXiv:2412.10319)",
    licence="MIT",
    sources={f"scbench_{name}": (source,) for name, source in SOURCES.items()},
    metric="score",
    sized=False,
    lexicons=("natural",),
)

REQUESTS = replace(
    BENCHMARK,
    name="scbench_scdq",
    leaves=tuple(f"scdq_{name}" for name in NAMES),
    summary="SCBench's questions one by one, each on the same context (multi-request mode)",
    sources={f"scdq_{name}": (source,) for name, source in SOURCES.items()},
)
