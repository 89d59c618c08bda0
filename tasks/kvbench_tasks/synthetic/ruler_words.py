"""RULER's vocabulary: the English words of the package `wonderwords` (MIT).

RULER draws the keys of its needles and the words of its common-words task from there. Row hashes
depend on the lists, so tasks that use them put `release()` into their version.
"""

from __future__ import annotations

import functools
from importlib.metadata import version

from wonderwords import Defaults, RandomWord


@functools.cache
def adjectives() -> tuple[str, ...]:
    """Return the distinct adjectives, sorted."""
    return _sorted(Defaults.ADJECTIVES)


@functools.cache
def nouns() -> tuple[str, ...]:
    """Return the distinct nouns, sorted."""
    return _sorted(Defaults.NOUNS)


@functools.cache
def all_words() -> tuple[str, ...]:
    """Return the distinct nouns, adjectives and verbs, sorted."""
    return _sorted(Defaults.NOUNS, Defaults.ADJECTIVES, Defaults.VERBS)


@functools.cache
def release() -> str:
    """Return name and version of the installed package."""
    return f"wonderwords-{version('wonderwords')}"


def _sorted(*word_lists: Defaults) -> tuple[str, ...]:
    lists_by_name = {word_list.name: word_list for word_list in word_lists}
    # The tries only speed up searches by prefix. `filter` returns distinct words in order.
    return tuple(RandomWord(enhanced_prefixes=False, **lists_by_name).filter())
