"""Passages of books: the text that is read, and the text that follows it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc, Source
from kvbench.data.sources import rows
from kvbench.errors import UserError
from kvbench_tasks.synthetic.fitting import Size, Streams, largest

SOURCE = Source(
    "emozilla/pg19",
    file="data/test-00000-of-00001-29a571947c0b5ccc.parquet",
    columns=("short_book_title", "publication_date", "text"),
    revision="c021754c8e01c5b1cc83a1f549c1f97fbbb756b8",
)

_WORD = re.compile(r"\s*\S+")
"""A word with the white space before it."""

SCORED = 256
"""Tokens that are scored after a compressed context; at most a quarter of the length."""
PROMPT = 32
"""Tokens before the stream; at most an eighth of the length."""


def passages(
    leaf: str, *, length: int, samples: int, seed: int, cache_dir: Path, size: Size, **_: Any
) -> list[Doc]:
    """Make the rows of a leaf; see `Benchmark.docs`.

    Books are in random order, and the order repeats after the last one; row i is a passage of
    `length` tokens at a random place of book i. Books that are too short are left out.
    """
    everything = _books(cache_dir)
    books = [book for book in everything if book.words > length]
    if not books or length < 8:
        longest = max(book.words for book in everything)
        raise UserError(f"{leaf}: --length {length} does not fit; use 8 to {longest - 1}")
    order = Streams("pg19", seed)["books"].sample(range(len(books)), len(books))
    wanted = min(PROMPT, length // 8) if leaf == "pg19_stream" else length - _scored(length)
    made = []
    for i in range(samples):
        book = books[order[i % len(books)]]
        start = Streams("pg19", length, seed, i)["start"].randrange(book.words - length)
        # A word has at least one token.
        words = [found[0] for found in islice(_WORD.finditer(book.text), start, start + length)]
        row = _row(words, wanted, length, size)
        made.append({**row, "extra": {"book": book.title, "year": book.year}})
    return made


def _scored(length: int) -> int:
    return min(SCORED, length // 4)


def _row(words: list[str], wanted: int, length: int, size: Size) -> Doc:
    """Split words into a context of at most `wanted` tokens and what follows, up to `length`."""
    text = [words[0].lstrip(), *words[1:]]

    def tokens(count: int) -> int:
        return size("".join(text[:count]), "")

    told = max(2, largest(tokens, wanted, len(text) - 1))
    end = max(told + 1, largest(tokens, length, len(text)))
    given = "".join(text[told:end])
    return {
        "context": "".join(text[: told - 1]),
        "question": text[told - 1],  # read after the compression
        "given": given,
        "outputs": [given[:100].strip()],  # for the tables: how the text continues
        "max_new_tokens": max(1, tokens(end) - tokens(told)),
    }


@dataclass(frozen=True)
class _Book:
    title: str
    year: int
    text: str
    words: int


@functools.lru_cache(maxsize=2)
def _books(cache_dir: Path) -> list[_Book]:
    return [
        _Book(row["short_book_title"], row["publication_date"], text, len(text.split()))
        for row in rows(SOURCE, cache_dir)
        for text in [row["text"]]
    ]
