"""Passages of books: a context and its continuation."""

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
"""A word with its preceding white space."""

SCORED = 256
"""Tokens scored after a compressed context; at most a quarter of the length."""
PROMPT = 32
"""Tokens before the stream; at most an eighth of the length."""


def passages(
    leaf: str, *, length: int, samples: int, seed: int, cache_dir: Path, size: Size, **options: Any
) -> list[Doc]:
    """Return the rows of a task; see `Benchmark.docs`.

    Books are in random order, repeated after the last one; row i is a passage of `length` tokens at a random position
    of book i. Books that are too short are skipped.
    """
    all_books = _books(cache_dir)
    books = [book for book in all_books if book.words > length]
    if not books or length < 8:
        longest = max(book.words for book in all_books)
        raise UserError(f"{leaf}: --length {length} does not fit; use 8 to {longest - 1}")
    book_order = Streams("pg19", seed)["books"].sample(range(len(books)), len(books))
    context_tokens = min(PROMPT, length // 8) if leaf == "pg19_stream" else length - _scored_tokens(length)
    documents = []
    for sample_index in range(samples):
        book = books[book_order[sample_index % len(books)]]
        start = Streams("pg19", length, seed, sample_index)["start"].randrange(book.words - length)
        # A word has at least one token.
        words = [match[0] for match in islice(_WORD.finditer(book.text), start, start + length)]
        document = _row(words, context_tokens, length, size)
        documents.append({**document, "extra": {"book": book.title, "year": book.year}})
    return documents


def _scored_tokens(length: int) -> int:
    return min(SCORED, length // 4)


def _row(words: list[str], context_tokens: int, length: int, size: Size) -> Doc:
    """Split words into a context of at most `context_tokens` and a continuation, up to `length`."""
    pieces = [words[0].lstrip(), *words[1:]]

    def count_tokens(word_count: int) -> int:
        return size("".join(pieces[:word_count]), "")

    context_words = max(2, largest(count_tokens, context_tokens, len(pieces) - 1))
    end_word = max(context_words + 1, largest(count_tokens, length, len(pieces)))
    continuation = "".join(pieces[context_words:end_word])
    return {
        "context": "".join(pieces[: context_words - 1]),
        "question": pieces[context_words - 1],  # read after the compression
        "given": continuation,
        "outputs": [continuation[:100].strip()],  # for the tables: how the text continues
        "max_new_tokens": max(1, count_tokens(end_word) - count_tokens(context_words)),
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
        _Book(
            record["short_book_title"],
            record["publication_date"],
            book_text,
            len(book_text.split()),
        )
        for record in rows(SOURCE, cache_dir)
        for book_text in [record["text"]]
    ]
