"""What a lexicon is: the words and templates in which a synthetic task is written."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UserError
from kvbench_tasks.fitting import Plan, Streams

Tokens = Callable[[str], int]
"""About how many tokens a text takes."""


@dataclass(frozen=True)
class Niah:
    """A needle task, in RULER's terms.

    Attributes:
        haystack: "noise" (one sentence over and over), "essay", or "needle" (needles only).
        key: What is asked for.
        value: What is answered.
        keys: Needles' keys.
        values: Values of each key.
        queries: How many of the keys are asked.
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
        streams: The sample's generators.
        length: Tokens of prompt and answer; decides word counts, not the fitting.
        essay: Gives the sentences of an essay haystack, as words; None: the lexicon's own.
    """

    def __init__(
        self,
        streams: Streams,
        length: int,
        essay: Callable[[], Sequence[Sequence[str]]] | None = None,
    ) -> None:
        self.streams = streams
        self.length = length
        self.essay = essay

    @abstractmethod
    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[Plan]:
        """Needles in a haystack, at the given depths (0 to 1) or at random ones."""

    @abstractmethod
    def vt(self, hops: int) -> list[Plan]:
        """A chain of assignments: which variables hold the value?"""

    @abstractmethod
    def cwe(self) -> list[Plan]:
        """A list in which ten words are common: which?"""

    @abstractmethod
    def fwe(self) -> list[Plan]:
        """Coded text with Zipf-like counts: which three words are the most frequent?"""

    @abstractmethod
    def listing(self, tokens: Tokens) -> list[Plan]:
        """Numbered items in no order: all of them, in order."""

    @abstractmethod
    def passage(self, tokens: Tokens) -> list[Plan]:
        """A passage: copy it."""

    @abstractmethod
    def steps(self, tokens: Tokens) -> list[Plan]:
        """A long chain of assignments: every step of it, in order."""

    @abstractmethod
    def dialogue(self, turns: int, facts: int) -> list[Plan]:
        """Turns with so many new facts each; each asks for a fact that is not asked otherwise."""


def asked_facts(rng: random.Random, turns: int, facts: int) -> list[int]:
    """Which fact each turn asks for: any that has been told by then and was not asked before.

    Args:
        rng: Draws them.
        turns: How many turns.
        facts: New facts of each turn; fact i is told in turn i // facts.
    """
    known: list[int] = []
    asked = []
    for turn in range(turns):
        known += range(turn * facts, (turn + 1) * facts)
        asked.append(known.pop(rng.randrange(len(known))))
    return asked


def lexicon(name: str) -> type[Lexicon]:
    """The lexicon of a name: "natural" or "reference".

    Raises:
        UserError: There is no such lexicon.
    """
    if name == "natural":
        from kvbench_tasks.natural import NaturalLexicon

        return NaturalLexicon
    if name == "reference":
        from kvbench_tasks.reference import ReferenceLexicon

        return ReferenceLexicon
    raise UserError(f"unknown lexicon {name!r}; there are natural, reference")
