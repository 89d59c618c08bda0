"""RULER's thirteen tasks (arXiv:2404.06654), reimplemented. See README.md."""

from __future__ import annotations

from pathlib import Path

from kvbench.benchmark import Benchmark
from kvbench_tasks.ruler.qa import HOTPOT, SQUAD
from kvbench_tasks.ruler.tasks import rows
from kvbench_tasks.synthetic.essays import ESSAYS

# Tasks with words from wonderwords, and variable tracking in RULER's current form.
_RAISED = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
)

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
    docs=rows,
    yaml=Path(__file__).parent,
    version="1",
    versions={"natural": dict.fromkeys(_RAISED, "2")},
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
    subsets={
        # The tasks that a model of 135 M parameters can solve (docs/smollm2.md); on others, policies have nothing to
        # lose.
        "smollm2": (
            "niah_single_1",
            "niah_single_2",
            "niah_single_3",
            "niah_multikey_1",
            "niah_multivalue",
            "niah_multiquery",
        ),
    },
)
