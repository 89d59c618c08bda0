"""Facts told over the turns of a dialogue, asked for in the same turn or later. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.synthetic.fitting import Plan, Size
from kvbench_tasks.synthetic.generate import generate
from kvbench_tasks.synthetic.lexicon import Lexicon

TURNS = 6
FACTS = 3
"""New facts of each turn."""


def docs(
    leaf: str,
    *,
    length: int,
    samples: int,
    seed: int,
    tokenizer: Any,
    lexicon: str,
    cache_dir: Path,
    size: Size,
) -> list[Doc]:
    """See `Benchmark.docs`."""

    def plans(words: Lexicon, index: int) -> Sequence[Plan]:
        return words.dialogue(TURNS, FACTS)

    return generate(
        leaf,
        plans,
        length=length,
        samples=samples,
        seed=seed,
        lexicon_name=lexicon,
        size=size,
    )


BENCHMARK = Benchmark(
    name="dialogue",
    leaves=("dialogue",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Facts told over six turns; each turn asks for one of its own or of an earlier turn",
    source="ours (kvbench)",
    licence="Apache-2.0",
    metric="string_match",
)
