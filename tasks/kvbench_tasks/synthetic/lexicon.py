"""What a lexicon is: the words and templates in which a synthetic task is written."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench_tasks.synthetic.fitting import HaystackPlan, Streams

Tokens = Callable[[str], int]
"""Counts the tokens of a text, give or take one."""


@dataclass(frozen=True)
class Niah:
    """A needle task, in RULER's terms.

    Attributes:
        haystack: "noise" (one sentence over and over), "essay", or "needle" (needles only).
        key: Kind of the needles' keys.
        value: Kind of their values.
        keys: How many keys.
        values: Values of each key.
        queries: How many of the keys are asked for.
    """

    haystack: Literal["noise", "essay", "needle"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


class Lexicon(ABC):
    """Writes one sample of each kind of task, of any size.

    Args:
        streams: The sample's random generators.
        length: Tokens of prompt and answer; decides word counts, not the fitting.
        essay: Sentences of an essay haystack, each a list of words; none: the lexicon's own.
    """

    def __init__(self, streams: Streams, length: int, essay: Sequence[Sequence[str]] | None = None) -> None:
        self.streams = streams
        self.length = length
        self.essay = essay
        self._materials: list[str] = []

    def uses(self, material: str) -> None:
        """Note that the sample is made of a material that can differ between machines."""
        if material not in self._materials:
            self._materials.append(material)

    @property
    def variant(self) -> str:
        """The materials that the sample is made of; joins the version of the task."""
        return "+".join(self._materials)

    @abstractmethod
    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[HaystackPlan]:
        """Needles in a haystack, at the given depths (0 to 1) or at random ones."""

    @abstractmethod
    def vt(self, hops: int, count_tokens: Tokens) -> list[HaystackPlan]:
        """A chain of assignments: which variables hold the value?"""

    @abstractmethod
    def cwe(self) -> list[HaystackPlan]:
        """A list in which ten words are common: which are they?"""

    @abstractmethod
    def fwe(self) -> list[HaystackPlan]:
        """Coded text with Zipf-like counts: which three words are the most frequent?"""

    @abstractmethod
    def listing(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Numbered items out of order: write all of them, in order."""

    @abstractmethod
    def passage(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """A passage: copy it."""

    @abstractmethod
    def steps(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """A long chain of assignments: write every step of it, in order."""

    @abstractmethod
    def dialogue(self, turns: int, facts: int) -> list[HaystackPlan]:
        """Turns with so many new facts each; each asks for a fact that no other turn asks for."""

    @abstractmethod
    def fact(self) -> list[HaystackPlan]:
        """One fact, told and asked for in another form than those of `niah`."""


def asked_facts(generator: random.Random, turns: int, facts: int) -> list[int]:
    """Draw the fact that each turn asks for: one that is told by then and was not asked before.

    Args:
        generator: Draws them.
        turns: How many turns.
        facts: New facts of each turn; fact i is told in turn i // facts.
    """
    open_facts: list[int] = []
    query_facts = []
    for turn in range(turns):
        open_facts += range(turn * facts, (turn + 1) * facts)
        query_facts.append(open_facts.pop(generator.randrange(len(open_facts))))
    return query_facts
