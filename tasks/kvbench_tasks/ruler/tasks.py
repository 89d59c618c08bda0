"""RULER's tasks, with the parameters of its `synthetic.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbench_tasks.ruler.qa import qa_rows
from kvbench_tasks.synthetic.fitting import Doc, HaystackPlan, Size
from kvbench_tasks.synthetic.generate import counter, generate
from kvbench_tasks.synthetic.lexicon import Lexicon, Niah, Tokens

_NIAH = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", keys=4, queries=4),
}
_HOPS = 4


def rows(leaf: str, *, cache_dir: Path, size: Size, **settings: Any) -> list[Doc]:
    """Return the rows of a task; see `Benchmark.docs`."""
    if leaf.startswith("qa_"):
        return qa_rows(leaf, cache_dir=cache_dir, size=size, **settings)
    needle_task = _NIAH.get(leaf)
    uses_essays = needle_task is not None and needle_task.haystack == "essay"
    essays_in = cache_dir if uses_essays else None
    return generate(leaf, _plans(leaf, counter(size)), size=size, essays_in=essays_in, **settings)


def _plans(task: str, count_tokens: Tokens) -> Callable[[Lexicon, int], Sequence[HaystackPlan]]:
    def plans(lexicon: Lexicon, index: int) -> Sequence[HaystackPlan]:
        if task in _NIAH:
            return lexicon.niah(_NIAH[task])
        if task == "vt":
            return lexicon.vt(_HOPS, count_tokens)
        return lexicon.cwe() if task == "cwe" else lexicon.fwe()

    return plans
