"""RULER's thirteen tasks (arXiv:2404.06654), by our own generators. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.tables import ESSAYS, HOTPOT, SQUAD


def docs(leaf: str, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    from kvbench_tasks.ruler.tasks import rows

    return rows(leaf, **options)


BENCHMARK = Benchmark(
    name="ruler",
    leaves=(
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "niah_multivalue",
        "niah_multiquery",
        "vt",
        "cwe",
        "fwe",
        "qa_1",
        "qa_2",
    ),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Needles, variable tracking, common and frequent words, question answering",
    source="https://github.com/NVIDIA/RULER (arXiv:2404.06654)",
    licence="Apache-2.0",
    sources={
        "niah_single_2": (ESSAYS,),
        "niah_single_3": (ESSAYS,),
        "niah_multikey_1": (ESSAYS,),
        "niah_multivalue": (ESSAYS,),
        "niah_multiquery": (ESSAYS,),
        "qa_1": (SQUAD,),
        "qa_2": (HOTPOT,),
    },
    needs_hub=frozenset({"qa_1", "qa_2"}),
    metric="string_match",
    default_lengths=(1024,),
)
