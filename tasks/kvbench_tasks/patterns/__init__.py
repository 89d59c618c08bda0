"""Long answers that continue a pattern: count on, or go through a list again and again. See README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench_tasks.synthetic.fitting import Streams
from kvbench_tasks.synthetic.words import words

ITEMS = 104
"""Items of an answer that are judged; with SmolLM2's tokenizer they are at least 512 tokens."""

COUNTED = 8
"""Numbers that the answer of `pattern_count` begins with."""

WORDS, ROUNDS = 10, 3
"""Words of the list of `pattern_cycle`, and the rounds through it that the answer begins with."""

TOKENS = 576
"""Most tokens of an answer."""

ROWS = 500
"""All rows of a task, so that its data is the same for any number of samples."""


def docs(leaf: str, *, seed: int, **_: Any) -> list[Doc]:
    """See `Benchmark.docs`."""
    row = _counting if leaf == "pattern_count" else _cycle
    return [row(Streams(leaf, seed, index)) for index in range(ROWS)]


def _counting(streams: Streams) -> Doc:
    first = streams["start"].randrange(100, 900 - ITEMS - COUNTED)
    numbers = [str(first + step) for step in range(COUNTED + ITEMS)]
    return {
        "context": f"Count from {first} to {numbers[-1]}.\n\n",
        "question": "Write all the numbers in order, with commas between them.",
        "gen_prefix": ", ".join(numbers[:COUNTED]) + ",",
        "outputs": numbers[COUNTED:],
        "form": "words",
        "max_new_tokens": TOKENS,
    }


def _cycle(streams: Streams) -> Doc:
    listed = streams["words"].sample(words("nouns"), WORDS)
    shown = WORDS * ROUNDS
    lines = [listed[step % WORDS] for step in range(shown + ITEMS)]
    return {
        "context": "\n".join(listed) + "\n\n",
        "question": "Repeat this list again and again, in the same order, and number the lines.",
        "gen_prefix": "\n".join(f"{step + 1}. {word}" for step, word in enumerate(lines[:shown])),
        "outputs": lines[shown:],
        "form": "lines",
        "max_new_tokens": TOKENS,
    }


BENCHMARK = Benchmark(
    name="patterns",
    leaves=("pattern_count", "pattern_cycle"),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Answers of more than 500 tokens that small models can write: count on, repeat a list",
    source="ours (kvbench)",
    licence="Apache-2.0",
    metric="placed",
    sized=False,
    lexicons=("natural",),
)
