"""LongProc: long answers that follow a procedure; six kinds, three lengths. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench_tasks.longproc.ask import allow, ask

_PREFIX = "longproc_"
_LENGTHS = {
    "countdown": ("0.5k", "2k", "8k"),
    "path_traversal": ("0.5k", "2k", "8k"),
    "tom_tracking": ("0.5k", "2k", "8k"),
    "html_to_tsv": ("0.5k", "2k", "8k"),
    "travel_planning": ("2k", "8k"),
    "pseudo_to_code": ("0.5k", "2k"),
}
_SOURCES = {
    f"{_PREFIX}{kind}_{length}": Source(
        "PrincetonPLI/LongProc",
        f"{kind}_{length}",
        "test",
        columns=("id", "input_prompt", "reference_output", "metadata"),
    )
    for kind, lengths in _LENGTHS.items()
    for length in lengths
}

# Version 2: beliefs and tables are compared as on the main branch, and 8k answers have HELMET's limit.
_RAISED = tuple(leaf for leaf in _SOURCES if "tom_tracking" in leaf or "html_to_tsv" in leaf or leaf.endswith("_8k"))


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    kind, _, length = leaf.removeprefix(_PREFIX).rpartition("_")
    allow(kind)
    return [ask(kind, length, record) for record in rows(_SOURCES[leaf], cache_dir)]


BENCHMARK = Benchmark(
    name="longproc",
    leaves=tuple(_SOURCES),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    versions={"natural": dict.fromkeys(_RAISED, "2")},
    summary="Long procedures: tables from HTML, searches, routes, beliefs, trips, code",
    source="https://huggingface.co/datasets/PrincetonPLI/LongProc (arXiv:2501.05414)",
    licence="Apache-2.0",
    sources={leaf: (source,) for leaf, source in _SOURCES.items()},
    metric="score",
    sized=False,
    lexicons=("natural",),
)
