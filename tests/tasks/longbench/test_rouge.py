"""LongBench's ROUGE-L; expected numbers are counted by hand from the definition."""

from __future__ import annotations

import pytest

from kvbench_tasks.longbench.rouge import union_rouge_l


def f(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("the cat sat", "the cat ran far", f(2 / 3, 2 / 4)),
        # Lin's example of the union: w1 w2 and w1 w3 w5 make 4 of the 5 words of the reference.
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", f(4 / 8, 4 / 5)),
        ("b a", "a b", f(1 / 2, 1 / 2)),
        ("a a a a", "a b", f(1 / 1, 1 / 2)),  # a word counts once
        ("one\ttwo\n three", "one two three", 1.0),
        ("Cat,", "cat", 0.0),  # case and punctuation stand
        ("naïve café", "café", f(1 / 2, 1)),
        ("a b", "a b. ", f(1, 2 / 3)),  # white space after the stop has the empty word
        ("b a. b", "a b", f(1 / 2, 1 / 2)),  # of the two common words of "b a" the walk finds b
        ("", "a", 0.0),
        ("...", "a", 0.0),
        ("a", "", 0.0),
    ],
)
def test_rouge_l(response: str, reference: str, expected: float) -> None:
    assert union_rouge_l(response, reference) == pytest.approx(expected, abs=1e-7)


def test_long_sentences_have_a_score() -> None:
    text = " ".join(f"w{i}" for i in range(700))
    assert union_rouge_l(text, text + " more") == pytest.approx(f(1, 700 / 701), abs=1e-7)
