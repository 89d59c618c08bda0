"""Words for one sample: those reserved for its questions, and filler for the rest."""

from __future__ import annotations

import numpy as np

from kvbench.reference import grammar

_SENTENCE = (4, 12)


class WordPool:
    """Draws the words of one sample, so that no reserved word occurs by accident.

    Args:
        rng: The random generator; every draw advances it.
        noise: Probability that `filler` is noise: one sentence, repeated.
    """

    def __init__(self, rng: np.random.Generator, noise: float = 0.12) -> None:
        self.rng = rng
        self._noise = noise
        self._unused = [grammar.WORDS[i] for i in rng.permutation(len(grammar.WORDS))]

    def reserve(self, count: int) -> list[str]:
        """Return `count` words that no later draw returns.

        Raises:
            ValueError: Too few words would be left for the rest of the sample.
        """
        if count > len(self._unused) - 32:
            raise ValueError(f"cannot reserve {count} of {len(self._unused)} words")
        taken, self._unused = self._unused[:count], self._unused[count:]
        return taken

    def release(self, words: list[str]) -> None:
        """Allow later draws to return `words` again."""
        self._unused += words

    def free(self, count: int) -> list[str]:
        """Return `count` words that are not reserved; words can repeat."""
        chosen = self.rng.integers(0, len(self._unused), size=count)
        return [self._unused[i] for i in chosen]

    def between(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, or `low` if it is larger than `high`."""
        return int(self.rng.integers(low, max(low, high) + 1))

    def log_between(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, uniform in its logarithm."""
        return int(np.exp(self.rng.uniform(np.log(low), np.log(max(low, high) + 1))))

    def filler(self, count: int) -> list[list[str]]:
        """Return sentences of `count` words in total; the last sentence is cut off."""
        if count <= 0:
            return []
        noise = self.rng.random() < self._noise
        repeated = grammar.sentence(self.free(self.between(5, 9)))
        text = [] if noise else self.free(count)
        sentences: list[list[str]] = []
        start = 0
        lengths = self.rng.integers(*_SENTENCE, size=count // _SENTENCE[0] + 1).tolist()
        while start < count:
            words = repeated if noise else grammar.sentence(text[start : start + lengths.pop()])
            words = words[: count - start]
            sentences.append(words)
            start += len(words)
        return sentences


Statement = tuple[float, list[str]]
"""A time, which orders the statements of a sample, and the words."""


def interleave(pool: WordPool, statements: list[Statement], room: int) -> list[str]:
    """Scatter statements, in order of time, between sentences of filler: `room` words in total.

    Raises:
        ValueError: The statements have more than `room` words.
    """
    spare = room - sum(len(words) for _, words in statements)
    if spare < 0:
        raise ValueError("the statements do not fit")
    sentences = pool.filler(spare)
    ordered = sorted(statements, key=lambda statement: statement[0])
    cuts = np.sort(pool.rng.integers(0, len(sentences) + 1, size=len(ordered))).tolist()
    context: list[str] = []
    for start, end, (_, words) in zip(
        [0, *cuts], [*cuts, len(sentences)], [*ordered, (0.0, [])], strict=True
    ):
        for sentence in sentences[start:end]:
            context += sentence
        context += words
    return context
