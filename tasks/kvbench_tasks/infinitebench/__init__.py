"""InfiniteBench (arXiv:2402.13718): eleven sets with contexts of about 100k tokens. See README.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.infinitebench.rows import KVPRESS_SETS, SETS, rows, source

_PREFIX, _KVPRESS_PREFIX = "infinitebench_", "infinitebench_kvpress_"
_CHANCE = {"longbook_choice_eng": 0.25, "code_debug": 0.25}


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    return rows(leaf.removeprefix(_PREFIX), cache_dir)


def kvpress_docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`. The same prompts, scored by the rules of KVPress."""
    return rows(leaf.removeprefix(_KVPRESS_PREFIX), cache_dir, rules="kvpress_")


BENCHMARK = Benchmark(
    name="infinitebench",
    leaves=tuple(_PREFIX + name for name in SETS),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    versions={"natural": {_PREFIX + name: "2" for name in KVPRESS_SETS}},
    summary="Retrieval, novels, dialogue, mathematics and code over about 100k tokens",
    source="https://github.com/OpenBMB/InfiniteBench (arXiv:2402.13718)",
    licence="MIT AND Apache-2.0",
    sources={_PREFIX + name: (source(name),) for name in SETS},
    chance={_PREFIX + name: chance for name, chance in _CHANCE.items()},
    sized=False,
    lexicons=("natural",),
)

KVPRESS = replace(
    BENCHMARK,
    name="infinitebench_kvpress",
    leaves=tuple(_KVPRESS_PREFIX + name for name in KVPRESS_SETS),
    docs=kvpress_docs,
    versions={},
    summary="Three sets of InfiniteBench, scored by the more lenient rules of KVPress",
    source="https://github.com/OpenBMB/InfiniteBench, scored as https://github.com/NVIDIA/kvpress",
    sources={_KVPRESS_PREFIX + name: (source(name),) for name in KVPRESS_SETS},
    chance={_KVPRESS_PREFIX + name: chance for name, chance in _CHANCE.items()},
)
