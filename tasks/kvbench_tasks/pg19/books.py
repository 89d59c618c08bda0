"""Passages of books: what is read, and what follows it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc
from kvbench.errors import UserError
from kvbench_tasks.fitting import Size, Streams

_WORD = re.compile(r"\s*\S+")
"""With the white space before it."""

SCORED = 256
"""Tokens that are scored after a compressed context, a quarter of the length at most."""
PROMPT = 32
"""Tokens before the stream, an eighth of the length at most."""


def passages(
    leaf: str, *, length: int, samples: int, seed: int, cache_dir: Path, size: Size, **_: Any
) -> list[Doc]:
    """The rows of a leaf; see `Benchmark.docs`.

    Row i is a passage of `length` tokens at a random place of book i of a random order, over and
    over; books that are too short for it are passed over.
    """
    everything = _books(cache_dir)
    books = [book for book in everything if book.words > length]
    if not books or length < 8:
        longest = max(book.words for book in everything)
        raise UserError(
            f"{leaf}: --length {length} does not fit; between 8 and {longest - 1} would be right"
        )
    order = Streams("pg19", seed)["books"].sample(range(len(books)), len(books))
    wanted = min(PROMPT, length // 8) if leaf == "pg19_stream" else length - _scored(length)
    rows = []
    for i in range(samples):
        book = books[order[i % len(books)]]
        start = Streams("pg19", length, seed, i)["start"].randrange(book.words - length)
        # A word has a token at least.
        words = [found[0] for found in islice(_WORD.finditer(book.text), start, start + length)]
        row = _row(words, wanted, length, size)
        rows.append({**row, "extra": {"book": book.title, "year": book.year}})
    return rows


def _scored(length: int) -> int:
    return min(SCORED, length // 4)


def _row(words: list[str], wanted: int, length: int, size: Size) -> Doc:
    """The first words, of `wanted` tokens at most, and those that follow, up to `length`."""
    text = [words[0].lstrip(), *words[1:]]

    def tokens(count: int) -> int:
        return size("".join(text[:count]), "")

    told = max(2, _most(tokens, wanted, len(text) - 1))
    end = max(told + 1, _most(tokens, length, len(text)))
    given = "".join(text[told:end])
    return {
        "context": "".join(text[: told - 1]),
        "question": text[told - 1],  # read after the compression: it tells the first scored token
        "given": given,
        "outputs": [given[:100].strip()],  # for the tables: how it goes on
        "max_new_tokens": max(1, tokens(end) - tokens(told)),
    }


def _most(tokens: Callable[[int], int], room: int, limit: int) -> int:
    """The largest count of words, up to `limit`, that stays within `room` tokens."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tokens(middle) <= room:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class _Book:
    title: str
    year: int
    text: str
    words: int


@functools.lru_cache(maxsize=2)
def _books(cache_dir: Path) -> list[_Book]:
    from kvbench.data.sources import rows
    from kvbench_tasks.pg19 import SOURCE

    return [
        _Book(row["short_book_title"], row["publication_date"], text, len(text.split()))
        for row in rows(SOURCE, cache_dir)
        for text in [row["text"]]
    ]
