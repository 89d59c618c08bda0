"""The languages of the attempts at a successor of the reference model.

Both use the vocabulary of `kvbench.reference.grammar`, and values of seven tokens.

- `words`: reference-1's sentences and needles `note K a b c d e f g .`
- `prose`: sentences in which most words follow from the word before, names and topics come back,
  and sentences are repeated. A needle is a sentence of ordinary words around a name and a number;
  the question repeats these words, as RULER's does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from kvbench.reference import grammar
from kvbench.reference.samples import IDS

Kind = Literal["words", "prose"]
Draw = Callable[[], float]
"""Returns numbers from 0 to 1."""

VALUE = 7
"""Tokens of a value."""

FILLER, NEEDLE, QUESTION, ANSWER, AGAIN = range(5)
"""What a token of a training sequence is part of; `AGAIN` is a context that is repeated."""

_SEED = 20261123
_PLAIN = grammar.WORDS[:352]
_NAMES = grammar.WORDS[352:]
_COMMON = _PLAIN[:24]
_FOLLOWERS = 6
_ZIPF = np.cumsum([1 / k for k in range(1, _FOLLOWERS + 1)])
_ZIPF /= _ZIPF[-1]


def _fixed_words() -> tuple[dict[str, list[str]], list[str], list[str]]:
    """The followers of every plain word, the first words of sentences, and those of needles."""
    rng = np.random.default_rng(_SEED)
    followers = {word: [_PLAIN[i] for i in rng.choice(len(_PLAIN), size=_FOLLOWERS, replace=False)] for word in _PLAIN}
    firsts = [_PLAIN[i] for i in rng.choice(len(_PLAIN), size=40, replace=False)]
    template = [_PLAIN[i] for i in rng.choice(len(_PLAIN), size=16, replace=False)]
    return followers, firsts, template


_NEXT, _FIRST, _T = _fixed_words()
_C = _COMMON


def keys_of(kind: Kind) -> tuple[str, ...]:
    """The words that can be keys."""
    return grammar.WORDS if kind == "words" else _NAMES


def needle(kind: Kind, key: str, value: Sequence[str]) -> list[str]:
    """The statement that `key` has `value`."""
    if kind == "words":
        return grammar.needle(key, value)
    return [*_C[:3], *_T[:3], _C[3], key, _C[4], ":", *value, grammar.STOP]


def ask(kind: Kind, key: str) -> list[str]:
    """The question for the value of `key`; in `prose` it ends with the start of the answer."""
    if kind == "words":
        return grammar.ask(key)
    about = [_C[2], *_T[:3], _C[3], key, _T[4], _C[5], _C[2], _T[5], _T[6]]
    return [_T[3], _C[4], *about, grammar.QUESTION, *about, _C[4], ":"]


def value(draw: Draw, kind: Kind, words: Sequence[str], size: int, numerals: int) -> list[str]:
    """A value: pool words, or the first `numerals` numerals."""
    source = words if kind == "words" else grammar.NUMERALS[:numerals]
    return [source[int(draw() * len(source))] for _ in range(size)]


class Filler:
    """Sentences of one context.

    Args:
        draw: Source of randomness.
        kind: The language.
        words: Words that are no keys of this context.
        numerals: How many numerals numbers are made of.
    """

    def __init__(self, draw: Draw, kind: Kind, words: Sequence[str], numerals: int) -> None:
        self._draw, self._kind, self._words = draw, kind, words
        self._numerals = grammar.NUMERALS[:numerals]
        if kind == "prose":
            names = [word for word in words if word in set(_NAMES)]
            self._topic = [self._pick(_PLAIN) for _ in range(8)]
            self._topic += [self._pick(names) for _ in range(6)]
            self._past: list[list[str]] = []

    def _pick(self, words: Sequence[str]) -> str:
        return words[int(self._draw() * len(words))]

    def sentence(self) -> list[str]:
        """The next sentence."""
        size = 4 + int(self._draw() * 8)
        if self._kind == "words":
            return grammar.sentence([self._pick(self._words) for _ in range(size)])
        if self._past and self._draw() < 0.15:
            return list(self._past[int(self._draw() * len(self._past))])
        words = [self._pick(_FIRST)]
        while len(words) < size:
            words.append(self._word(words[-1]))
        self._past.append([*words, grammar.STOP])
        return self._past[-1]

    def _word(self, last: str) -> str:
        """The word after `last`: of the topic, common, a comma, any, a numeral, or a follower."""
        kind = self._draw()
        if kind < 0.12:
            return self._pick(self._topic)
        if kind < 0.30:
            return _COMMON[int(self._draw() ** 2 * len(_COMMON))]
        if kind < 0.36 and last != grammar.COMMA:
            return grammar.COMMA
        if kind < 0.37:
            return self._pick(_PLAIN)
        if kind < 0.385:
            return self._pick(self._numerals)
        if last not in _NEXT:
            return self._pick(_FIRST)
        return _NEXT[last][int(np.searchsorted(_ZIPF, self._draw()))]


Tokens = tuple[list[int], list[int]]
"""Token ids of a training sequence, and what each is part of."""


def sequence(rng: np.random.Generator, kind: Kind, length: int, size: int, numerals: int) -> Tokens:
    """A context with needles, and questions with their answers: `length` tokens."""
    stream = iter(rng.random(8 * length + 4000).tolist())

    def draw() -> float:
        return float(next(stream))

    asked = len(ask(kind, "")) + size + 1
    told = len(needle(kind, "", [""] * size))
    space = length - 1
    questions = max(1, min(4 if kind == "words" else 3, int(space * 0.45 / asked)))
    most = max(1, int((space - questions * asked) * 0.7 / told))
    count = _count(draw, most)
    if draw() < 0.8:
        questions = min(questions, count)
    names = keys_of(kind)
    names = tuple(names[i] for i in rng.permutation(len(names)))
    keys, rest = names[:count], names[count:]
    values = [value(draw, kind, rest, size, numerals) for _ in keys]
    filler = Filler(draw, kind, rest, numerals)
    repeated = draw() < 0.3  # one sentence, over and over, as in RULER's noise
    fixed = filler.sentence()
    sentences: list[list[str]] = []
    left = space - count * told - questions * asked
    while left > 0:
        sentences.append((fixed if repeated else filler.sentence())[:left])
        left -= len(sentences[-1])
    cuts = sorted(int(draw() * (len(sentences) + 1)) for _ in keys)
    words, parts = [grammar.BOS], [NEEDLE]
    for place in range(len(sentences) + 1):
        for cut, key, number in zip(cuts, keys, values, strict=True):
            if cut == place:
                _add(words, parts, needle(kind, key, number), NEEDLE)
        if place < len(sentences):
            _add(words, parts, sentences[place], FILLER)
    for n in range(questions):
        chosen = int(draw() * count) if n >= count else n
        if count > questions:
            chosen = int(draw() * count)
        _add(words, parts, ask(kind, keys[chosen]), QUESTION)
        _add(words, parts, [*values[chosen], grammar.STOP], ANSWER)
    return [IDS[word] for word in words], parts


def again(rng: np.random.Generator, kind: Kind, length: int, size: int, numerals: int) -> Tokens:
    """A context with needles, then the same context until there are `length` tokens."""
    half = (length - 1) // 2
    ids, parts = sequence(rng, kind, max(half * 2, 96), size, numerals)
    body = [(i, p) for i, p in zip(ids[1:], parts[1:], strict=True) if p < QUESTION]
    body = body[: half if rng.random() < 0.7 else max(8, int(rng.integers(8, half + 1)))]
    tokens = [(IDS[grammar.BOS], NEEDLE), *body]
    while len(tokens) < length:
        tokens += [(i, AGAIN) for i, _ in body]
    return [i for i, _ in tokens[:length]], [p for _, p in tokens[:length]]


def _count(draw: Draw, most: int) -> int:
    """How many needles a context has: often 1 or 4, at most 24."""
    if draw() < 0.2:
        return 1
    if draw() < 0.3 and most >= 4:
        return 4
    return min(max(1, int(np.exp(draw() * np.log(min(most, 24) + 0.99)))), most)


def _add(words: list[str], parts: list[int], more: Sequence[str], part: int) -> None:
    words += more
    parts += [part] * len(more)
