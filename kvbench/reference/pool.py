"""Words for one sample: those reserved for its questions, and filler for the rest."""

from __future__ import annotations

import numpy as np

from kvbench.reference import grammar

_SENTENCE = (4, 12)


class WordPool:
    """Words of one sample, drawn so that no reserved word occurs by accident.

    Args:
        rng: Random generator; every draw advances it.
        noise: Probability that `filler` is one repeated sentence.
    """

    def __init__(self, rng: np.random.Generator, noise: float = 0.12) -> None:
        self.rng = rng
        self._noise = noise
        self._unused = [grammar.WORDS[word_index] for word_index in rng.permutation(len(grammar.WORDS))]

    def reserve(self, word_count: int) -> list[str]:
        """Return `word_count` words that no later draw returns.

        Raises:
            ValueError: Too few words would be left for the rest of the sample.
        """
        if word_count > len(self._unused) - 32:
            raise ValueError(f"cannot reserve {word_count} of {len(self._unused)} words")
        reserved, self._unused = self._unused[:word_count], self._unused[word_count:]
        return reserved

    def release(self, words: list[str]) -> None:
        """Allow later draws to return `words` again."""
        self._unused += words

    def free(self, word_count: int) -> list[str]:
        """Return `word_count` words that are not reserved; words can repeat."""
        word_indices = self.rng.integers(0, len(self._unused), size=word_count)
        return [self._unused[word_index] for word_index in word_indices]

    def between(self, lower: int, upper: int) -> int:
        """Return an integer from `lower` to `upper`, or `lower` if it is larger than `upper`."""
        return int(self.rng.integers(lower, max(lower, upper) + 1))

    def log_between(self, lower: int, upper: int) -> int:
        """Return an integer from `lower` to `upper`, uniform in its logarithm."""
        return int(np.exp(self.rng.uniform(np.log(lower), np.log(max(lower, upper) + 1))))

    def filler(self, word_count: int) -> list[list[str]]:
        """Return sentences of `word_count` words in total; the last sentence is truncated."""
        if word_count <= 0:
            return []
        is_noise = self.rng.random() < self._noise
        repeated_words = grammar.sentence(self.free(self.between(5, 9)))
        random_words = [] if is_noise else self.free(word_count)
        sentences: list[list[str]] = []
        position = 0
        lengths = self.rng.integers(*_SENTENCE, size=word_count // _SENTENCE[0] + 1).tolist()
        while position < word_count:
            sentence_words = (
                repeated_words if is_noise else grammar.sentence(random_words[position : position + lengths.pop()])
            )
            sentence_words = sentence_words[: word_count - position]
            sentences.append(sentence_words)
            position += len(sentence_words)
        return sentences


Statement = tuple[float, list[str]]
"""A time, which orders the statements of a sample, and the words."""


def interleave(word_pool: WordPool, statements: list[Statement], word_limit: int) -> list[str]:
    """Scatter statements in order of time between filler sentences: `word_limit` words in total.

    Raises:
        ValueError: The statements have more than `word_limit` words.
    """
    filler_count = word_limit - sum(len(statement_words) for _, statement_words in statements)
    if filler_count < 0:
        raise ValueError("the statements do not fit")
    sentences = word_pool.filler(filler_count)
    ordered = sorted(statements, key=lambda statement: statement[0])
    insert_points = np.sort(word_pool.rng.integers(0, len(sentences) + 1, size=len(ordered))).tolist()
    context: list[str] = []
    for slice_start, slice_end, (_, statement_words) in zip(
        [0, *insert_points], [*insert_points, len(sentences)], [*ordered, (0.0, [])], strict=True
    ):
        for sentence in sentences[slice_start:slice_end]:
            context += sentence
        context += statement_words
    return context
