"""Text metrics that score one response against references, from 0 to 1.

Normalisation, F1 over words and exact match are SQuAD's (arXiv:1606.05250, section 6.1: punctuation and articles are
ignored). LongBench (arXiv:2308.14508), InfiniteBench (arXiv:2402.13718), CoQA (arXiv:1808.07042) and the user's own
data use them, with parameters for their differences.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_ARTICLES = ("a", "an", "the")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(answer: str) -> str:
    """Convert to lower case, remove ASCII punctuation, then English articles, and collapse white space.

    Punctuation is removed first and leaves no gap: "the-end" becomes "theend", which contains no article.
    """
    return " ".join(_ARTICLE.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def answer_words(answer: str, *, split_first: bool = False) -> list[str]:
    """Split a text into its normalised words.

    Args:
        split_first: Split at white space before removing articles. An article next to a non-ASCII mark, as in "“the",
            is then kept; SQuAD removes it.
    """
    if not split_first:
        return normalize_answer(answer).split()
    words = answer.lower().translate(_PUNCTUATION).split()
    return [word for word in words if word not in _ARTICLES]


def f1_words(response_words: Sequence[str], reference_words: Sequence[str], *, both_empty: float = 0.0) -> float:
    """Return the harmonic mean of word precision and recall; repeated words count repeatedly.

    Args:
        response_words: Words of the response.
        reference_words: Words of the reference.
        both_empty: Score if both are empty. If only one of them is empty, the score is 0.
    """
    if not response_words and not reference_words:
        return both_empty
    return _harmonic(
        (Counter(response_words) & Counter(reference_words)).total(),
        len(response_words),
        len(reference_words),
    )


def f1(response: str, reference: str, *, both_empty: float = 0.0) -> float:
    """Return `f1_words` of the normalised texts."""
    return f1_words(answer_words(response), answer_words(reference), both_empty=both_empty)


def exact_match(response: str, reference: str) -> float:
    """Return 1 if the normalised texts are equal, else 0."""
    return float(normalize_answer(response) == normalize_answer(reference))


def best(metric: Callable[[str, str], float], response: str, references: Iterable[str]) -> float:
    """Score a response against each reference and return the best score; 0 for no reference."""
    return max((metric(response, reference) for reference in references), default=0.0)


def rouge_l(response: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words (ROUGE-L of `rouge_score`, without stemming).

    Words are runs of ASCII letters and digits, in lower case. Memory grows with the length of one text, not with the
    product of both lengths as in `rouge_score`.
    """
    response_words, reference_words = (re.findall(r"[a-z0-9]+", answer.lower()) for answer in (response, reference))
    return _harmonic(
        _common_subsequence(response_words, reference_words),
        len(response_words),
        len(reference_words),
    )


def rouge_lsum(response: str, references: Sequence[str]) -> float:
    """Return the F1 of rougeLsum by `rouge_score`, without stemming; the best over the references.

    Line feeds separate sentences; words are runs of ASCII letters and digits, in lower case.
    """
    return float(_rouge_scorer().score_multi(list(references), response)["rougeLsum"].fmeasure)


@functools.cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk and absl, about two seconds

    return RougeScorer(["rougeLsum"], use_stemmer=False)


def _harmonic(shared_count: int, response_count: int, reference_count: int) -> float:
    return 2 * shared_count / (response_count + reference_count) if shared_count else 0.0


def _common_subsequence(first_words: Sequence[str], second_words: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, computed row by row to save memory."""
    length_row = [0] * (len(second_words) + 1)
    for word in first_words:
        diagonal = 0
        for column, other_word in enumerate(second_words, 1):
            upper_length = length_row[column]
            length_row[column] = diagonal + 1 if word == other_word else max(upper_length, length_row[column - 1])
            diagonal = upper_length
    return length_row[-1]
