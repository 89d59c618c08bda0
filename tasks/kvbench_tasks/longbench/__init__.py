"""LongBench (arXiv:2308.14508): 14 English sets and two of code. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.longbench.rows import DOMAINS, SETS, rows, source


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
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
    sized=False,
    lexicons=("natural",),
    subsets={f"longbench_{domain}": tuple(f"longbench_{name}" for name in sets) for domain, sets in DOMAINS.items()},
    plain=frozenset(f"longbench_{name}" for name in (*DOMAINS["few_shot"], *DOMAINS["code"])),
)
