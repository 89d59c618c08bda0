"""LongBench (arXiv:2308.14508): its 14 English sets and two of code. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source

DOMAINS = {
    "single_doc_qa": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi_doc_qa": ("hotpotqa", "2wikimqa", "musique"),
    "summarization": ("gov_report", "qmsum", "multi_news"),
    "few_shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
"""The sets by domain; a leaf is called `longbench_` and the set's name."""

SETS = tuple(name for sets in DOMAINS.values() for name in sets)

FIELDS = ("input", "context", "answers", "length", "all_classes", "_id")


def source(name: str) -> Source:
    """A set's table: the dataset's repository has a loading script and one archive."""
    return Source(
        "zai-org/LongBench",
        file=f"data.zip:data/{name}.jsonl",
        columns=FIELDS,
        revision="4a90f81c8db79f60c15f77dcd207a1099038c775",
    )


def docs(leaf: str, *, cache_dir: Path, **_: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    from kvbench_tasks.longbench.rows import rows

    return rows(leaf.removeprefix("longbench_"), cache_dir)


BENCHMARK = Benchmark(
    name="longbench",
    leaves=tuple(f"longbench_{name}" for name in SETS),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Questions, summaries, few-shot, synthetic and code: 16 sets in six domains",
    source="https://github.com/THUDM/LongBench (arXiv:2308.14508)",
    licence="MIT",
    sources={f"longbench_{name}": (source(name),) for name in SETS},
    needs_hub=frozenset(f"longbench_{name}" for name in SETS),
    sized=False,
    lexicons=("natural",),
    subsets={
        f"longbench_{domain}": tuple(f"longbench_{name}" for name in sets)
        for domain, sets in DOMAINS.items()
    },
    plain=frozenset(f"longbench_{name}" for name in (*DOMAINS["few_shot"], *DOMAINS["code"])),
)
