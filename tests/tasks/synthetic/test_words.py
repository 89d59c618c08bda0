"""Our own word lists and prose, and RULER's vocabulary."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import islice

from wonderwords import Defaults, RandomWord

from kvbench_tasks.synthetic import ruler_words
from kvbench_tasks.synthetic.words import compounds, prose, words


def test_rulers_words_are_the_lists_of_wonderwords() -> None:
    everything: set[str] = set()
    for found, kind in (
        (ruler_words.nouns(), Defaults.NOUNS),
        (ruler_words.adjectives(), Defaults.ADJECTIVES),
    ):
        assert list(found) == sorted(set(found))
        assert set(RandomWord(x=kind).random_words(500)) <= set(found)
        everything |= set(found)
    assert everything < set(ruler_words.all_words())
    assert list(ruler_words.all_words()) == sorted(set(ruler_words.all_words()))
    # What RULER needs: at 16K about 600 to 900 distinct words, at 128K about 8,000.
    assert len(ruler_words.all_words()) > 8000


def test_compounds_are_distinct_and_a_longer_list_begins_with_a_shorter() -> None:
    def take(count: int) -> Sequence[str]:
        return list(islice(compounds(random.Random(3)), count))

    many = take(5000)
    assert take(20) == many[:20]
    assert len(set(many)) == 5000
    assert all(re.fullmatch("[a-z]+-[a-z]+", word) for word in many)


def test_word_lists_are_large_and_apart() -> None:
    lists = [words(kind) for kind in ("nouns", "adjectives", "verbs")]
    assert [len(found) >= n for found, n in zip(lists, (300, 200, 150), strict=True)] == [True] * 3
    everything = [word for found in lists for word in found]
    assert len(set(everything)) == len(everything)
    assert all(re.fullmatch("[a-z]+", word) for word in everything)


def test_prose_varies_and_holds_no_key_or_value() -> None:
    sentences = [" ".join(s) for s in islice(prose(random.Random(0)), 500)]
    assert len(set(sentences)) == 500
    assert all(s.endswith(".") and s[0].isupper() for s in sentences)
    assert not re.search(r"[\d{}-]|\ba [aeiou]|\ban [^aeiou]|  ", " ".join(sentences))
