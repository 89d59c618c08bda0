"""Boxes of coins: how many are in one of them? A benchmark of one task, in a package of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc
from kvbench.reference import grammar

MOST = 250
"""Boxes at most: the reference model's language has 512 words to name them with."""


def docs(
    leaf: str,
    *,
    length: int,
    samples: int,
    seed: int,
    lexicon: str,
    size: Callable[[str, str], int],
    **_: Any,
) -> list[Doc]:
    """The first rows, each with as many boxes as fit; see `Benchmark.docs`."""
    return [_row(random.Random(f"{leaf} {seed} {i}"), length, lexicon, size) for i in range(samples)]


def _row(rng: random.Random, length: int, lexicon: str, size: Callable[[str, str], int]) -> Doc:
    """Row i has a generator of its own: it does not depend on how many rows there are."""
    facts, question, output = _reference(rng) if lexicon == "reference" else _natural(rng)
    limit = 12 if lexicon == "natural" else 3
    place = [rng.random() for _ in facts]

    def context(boxes: int) -> str:
        """The first fact, which is asked for, and others, in an order that more do not change."""
        order = sorted(range(boxes), key=place.__getitem__)
        return "".join(f"{facts[i]} " for i in order)

    low, high = 1, len(facts)
    while low < high:
        middle = (low + high + 1) // 2
        if size(context(middle), question) + limit <= length:
            low = middle
        else:
            high = middle - 1
    return {
        "context": context(low),
        "question": question,
        "outputs": [output],
        "max_new_tokens": limit,
        "until": ["\n"] if lexicon == "natural" else [grammar.STOP],
    }


def _natural(rng: random.Random) -> tuple[list[str], str, str]:
    """Facts in English, the first of which is asked for."""
    boxes = rng.sample(range(1, 1000), MOST)
    coins = rng.sample(range(1000, 10000), MOST)
    facts = [f"Box {box} holds {n} coins." for box, n in zip(boxes, coins, strict=True)]
    return facts, f"How many coins are in box {boxes[0]}? The number is:", str(coins[0])


def _reference(rng: random.Random) -> tuple[list[str], str, str]:
    """The same in the language of the reference model, which has words for numbers."""
    words = rng.sample(grammar.WORDS, len(grammar.WORDS))
    boxes, others = words[:MOST], words[MOST:]
    coins = [rng.sample(others, 2) for _ in boxes]
    facts = [" ".join(grammar.needle(b, c)) for b, c in zip(boxes, coins, strict=True)]
    return facts, " ".join(grammar.ask(boxes[0])), " ".join(coins[0])


BENCHMARK = Benchmark(
    name="example",
    leaves=("example_boxes",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="How many coins are in one of many boxes",
    source="https://example.org",
    licence="Apache-2.0",
    metric="found",
)
