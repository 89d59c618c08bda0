"""Words for one sample: what is reserved for questions, what is filler, and their mixture."""

from __future__ import annotations

import numpy as np

from kvbench.reference import grammar

_SENTENCE = (4, 12)


class Source:
    """Draws words for one sample, so that what is asked for occurs nowhere by accident."""

    def __init__(self, rng: np.random.Generator, noise: float = 0.12) -> None:
        """Start with the whole pool; `noise` is the chance of :meth:`filler` being noise."""
        self.rng = rng
        self._noise = noise
        self._fresh = [grammar.WORDS[i] for i in rng.permutation(len(grammar.WORDS))]

    def reserve(self, count: int) -> list[str]:
        """Return `count` words that no later draw returns.

        Raises:
            ValueError: too few words are left to fill the rest of a sample with.
        """
        if count > len(self._fresh) - 32:
            raise ValueError(f"cannot reserve {count} of {len(self._fresh)} words")
        taken, self._fresh = self._fresh[:count], self._fresh[count:]
        return taken

    def release(self, words: list[str]) -> None:
        """Let later draws return `words` again."""
        self._fresh += words

    def free(self, count: int) -> list[str]:
        """Return `count` words, with repetition, that nothing has reserved."""
        left = self._fresh
        return [left[i] for i in self.rng.integers(0, len(left), size=count)]

    def between(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, `low` if that is the greater."""
        return int(self.rng.integers(low, max(low, high) + 1))

    def log_between(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, uniform in its logarithm."""
        return int(np.exp(self.rng.uniform(np.log(low), np.log(max(low, high) + 1))))

    def filler(self, count: int) -> list[list[str]]:
        """Return sentences of `count` words in all, the last one cut off: essay or noise.

        Noise is one sentence over and over.
        """
        if count <= 0:
            return []
        noise = self.rng.random() < self._noise
        fixed = grammar.sentence(self.free(self.between(5, 9)))
        text = [] if noise else self.free(count)
        sentences: list[list[str]] = []
        start = 0
        lengths = self.rng.integers(*_SENTENCE, size=count // _SENTENCE[0] + 1).tolist()
        while start < count:
            words = fixed if noise else grammar.sentence(text[start : start + lengths.pop()])
            words = words[: count - start]
            sentences.append(words)
            start += len(words)
        return sentences


Statement = tuple[float, list[str]]


def interleave(source: Source, statements: list[Statement], room: int) -> list[str]:
    """Return `statements`, by time, scattered between sentences of filler: `room` words in all."""
    spare = room - sum(len(words) for _, words in statements)
    if spare < 0:
        raise ValueError("the statements do not fit")
    sentences = source.filler(spare)
    order = sorted(statements, key=lambda statement: statement[0])
    cuts = np.sort(source.rng.integers(0, len(sentences) + 1, size=len(order)))
    context: list[str] = []
    done = 0
    for cut, (_, words) in zip(cuts, order, strict=True):
        for words_between in sentences[done:cut]:
            context += words_between
        done = cut
        context += words
    for words_between in sentences[done:]:
        context += words_between
    return context
