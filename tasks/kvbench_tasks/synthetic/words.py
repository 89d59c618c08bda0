"""kvbench's lists of English words, and prose generated from them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """Return the words of a kind: "nouns", "adjectives" or "verbs" (base forms)."""
    word_lists = json.loads(files("kvbench_tasks.synthetic").joinpath("words.json").read_text(encoding="utf-8"))
    return tuple(word for line in word_lists[kind] for word in line.split())


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


def compounds(generator: random.Random) -> Iterator[str]:
    """Yield distinct adjective-noun compounds, without end."""
    used_compounds: set[str] = set()
    while True:
        compound = f"{generator.choice(words('adjectives'))}-{generator.choice(words('nouns'))}"
        if compound not in used_compounds:
            used_compounds.add(compound)
            yield compound


def prose(generator: random.Random) -> Iterator[list[str]]:
    """Yield sentences without end, each a list of words, the last one with its full stop.

    No word contains a hyphen or a digit, so that no key or value of a needle can occur.
    """
    word_lists = {kind[:-1] if kind != "adjectives" else "adj": words(kind) for kind in _KINDS}
    while True:
        sentence: list[str] = []
        for placeholder in generator.choice(_SENTENCES).split():
            field_name = placeholder.strip("{},")
            if not placeholder.startswith("{"):
                word = placeholder
            elif field_name in ("a", "the", "The"):
                word = field_name
            elif field_name == "time":
                word = generator.choice(_TIMES)
            elif field_name == "number":
                word = generator.choice(_NUMBERS)
            else:
                word = generator.choice(word_lists[field_name])
            if placeholder.startswith("{") and placeholder.endswith(","):
                word += ","
            if sentence and sentence[-1] == "a" and word[0] in "aeiou":
                sentence[-1] = "an"
            sentence.append(word)
        sentence[-1] += "."
        yield sentence


def words_of(sentences: Iterator[Sequence[str]]) -> Callable[[int], list[str]]:
    """Return a function that gives the first n words as sentences; the last may be truncated."""
    cached_sentences: list[Sequence[str]] = []

    def take(word_count: int) -> list[str]:
        segments: list[str] = []
        words_used = 0
        while words_used < word_count:
            if len(segments) == len(cached_sentences):
                cached_sentences.append(next(sentences))
            sentence = cached_sentences[len(segments)][: word_count - words_used]
            segments.append(" ".join(sentence))
            words_used += len(sentence)
        return segments

    return take


_KINDS = ("nouns", "adjectives", "verbs")
