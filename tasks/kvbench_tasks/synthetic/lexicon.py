"""Lexicons: the words and templates of synthetic tasks."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench_tasks.synthetic.fitting import HaystackPlan, Streams

Tokens = Callable[[str], int]
"""Counter of a text's tokens, accurate to one token."""


@dataclass(frozen=True)
class Niah:
    """A needle task, in RULER's terms.

    Attributes:
        haystack: "noise" (one sentence over and over), "essay", or "needle" (needles only).
        key: Kind of the needles' keys.
        value: Kind of their values.
        keys: Number of keys.
        values: Values per key.
        queries: Number of keys asked for.
    """

    haystack: Literal["noise", "essay", "needle"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


class Lexicon(ABC):
    """Generator of one sample of each kind of task, of any size.

    Args:
        streams: The sample's random generators.
        length: Tokens of prompt and answer; decides word counts, not the fitting.
        essay: Sentences of an essay haystack, each a list of words; None uses the lexicon's own.
    """

    def __init__(self, streams: Streams, length: int, essay: Sequence[Sequence[str]] | None = None) -> None:
        self.streams = streams
        self.length = length
        self.essay = essay
        self._materials: list[str] = []

    def uses(self, material: str) -> None:
        """Record that the sample uses a source that can differ between machines."""
        if material not in self._materials:
            self._materials.append(material)

    @property
    def variant(self) -> str:
        """Sources that the sample uses; part of the task's version."""
        return "+".join(self._materials)

    @abstractmethod
    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[HaystackPlan]:
        """Plan needles in a haystack, at the given depths (0 to 1) or at random ones."""

    @abstractmethod
    def vt(self, hops: int, count_tokens: Tokens) -> list[HaystackPlan]:
        """Plan a chain of assignments: which variables hold the value?"""

    @abstractmethod
    def cwe(self) -> list[HaystackPlan]:
        """Plan a list with ten common words: which are they?"""

    @abstractmethod
    def fwe(self) -> list[HaystackPlan]:
        """Plan coded text with Zipf-like counts: which three words are the most frequent?"""

    @abstractmethod
    def listing(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Plan numbered items out of order: write all of them, in order."""

    @abstractmethod
    def passage(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Plan a passage to copy."""

    @abstractmethod
    def steps(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Plan a long chain of assignments: write every step, in order."""

    @abstractmethod
    def dialogue(self, turns: int, facts: int) -> list[HaystackPlan]:
        """Plan turns with `facts` new facts each; each turn asks for a different fact."""

    @abstractmethod
    def fact(self) -> list[HaystackPlan]:
        """Plan one fact, stated and asked for in a different form than in `niah`."""


def asked_facts(generator: random.Random, turns: int, facts: int) -> list[int]:
    """Draw the fact that each turn asks for: one already stated and not asked for before.

    Args:
        generator: Random generator.
        turns: Number of turns.
        facts: New facts per turn; fact i is stated in turn i // facts.
    """
    open_facts: list[int] = []
    query_facts = []
    for turn in range(turns):
        open_facts += range(turn * facts, (turn + 1) * facts)
        query_facts.append(open_facts.pop(generator.randrange(len(open_facts))))
    return query_facts
