"""Our own lists of English words, and prose made of them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Our own words of a kind: "nouns", "adjectives" or "verbs" (base forms)."""
    lists = json.loads(
        files("kvbench_tasks.synthetic").joinpath("words.json").read_text(encoding="utf-8")
    )
    return tuple(word for line in lists[kind] for word in line.split())


_SENTENCES = (
    "{The} {adj} {noun} near {the} {noun} could {verb} {the} {adj} {noun}",
    "Every {time}, {a} {noun} from {the} {noun} would {verb} beside {the} {adj} {noun}",
    "When {the} {noun} was {adj}, nobody wanted to {verb} without {a} {noun}",
    "It is hard to {verb} and {verb} at once, unless {a} {adj} {noun} is close at hand",
    "{The} {noun} and {the} {noun} had little in common, except that both could {verb}",
    "Most people who {verb} for {a} {noun} learn that {the} {noun} will seldom {verb}",
    "If you {verb} {the} {noun} in {the} {time}, you may find {a} {adj}, {adj} {noun}",
    "Nobody had asked {the} {adj} {noun} to {verb}, and so it did not {verb}",
    "There was {a} {noun} behind {the} {noun}, {adj} and {adj}, where we used to {verb}",
    "To {verb} is {adj}, but to {verb} with {a} {adj} {noun} takes {a} whole {time}",
    "My {noun} says that {a} {adj} {noun} is worth more than {number} of any other kind",
    "They had to {verb} {number} times before {the} {noun} looked {adj} again",
    "Some call {the} {noun} {adj}, some call it {adj}, and the rest simply {verb}",
    "After {number} days in {the} {noun}, she began to {verb} and her {noun} grew {adj}",
    "Perhaps {the} {noun} will {verb} again once {the} {time} is over and the air is {adj}",
    "What matters to {a} {noun} is not {the} {noun} itself but how {adj} it has become",
    "We sat by {the} {adj} {noun} until the {time}, and then we had to {verb}",
    "Before {the} {noun} could {verb}, {a} {noun} appeared and the whole place turned {adj}",
)
_TIMES = "morning evening afternoon night week season spring summer".split()
_NUMBERS = "two three four five six seven eight nine ten twelve twenty".split()


def compounds(rng: random.Random) -> Iterator[str]:
    """Distinct adjective-noun compounds without end."""
    taken: set[str] = set()
    while True:
        made = f"{rng.choice(words('adjectives'))}-{rng.choice(words('nouns'))}"
        if made not in taken:
            taken.add(made)
            yield made


def prose(rng: random.Random) -> Iterator[list[str]]:
    """Sentences without end, each as a list of words, the last word with its full stop.

    No word contains a hyphen or a digit, so that no key or value of a needle can occur.
    """
    lists = {kind[:-1] if kind != "adjectives" else "adj": words(kind) for kind in _KINDS}
    while True:
        out: list[str] = []
        for part in rng.choice(_SENTENCES).split():
            name = part.strip("{},")
            if not part.startswith("{"):
                word = part
            elif name in ("a", "the", "The"):
                word = name
            elif name == "time":
                word = rng.choice(_TIMES)
            elif name == "number":
                word = rng.choice(_NUMBERS)
            else:
                word = rng.choice(lists[name])
            if part.startswith("{") and part.endswith(","):
                word += ","
            if out and out[-1] == "a" and word[0] in "aeiou":
                out[-1] = "an"
            out.append(word)
        out[-1] += "."
        yield out


def words_of(sentences: Iterator[Sequence[str]]) -> Callable[[int], list[str]]:
    """Make a function that returns the first n words as sentences; the last may be cut off."""
    made: list[Sequence[str]] = []

    def take(n: int) -> list[str]:
        pieces: list[str] = []
        used = 0
        while used < n:
            if len(pieces) == len(made):
                made.append(next(sentences))
            sentence = made[len(pieces)][: n - used]
            pieces.append(" ".join(sentence))
            used += len(sentence)
        return pieces

    return take


_KINDS = ("nouns", "adjectives", "verbs")
