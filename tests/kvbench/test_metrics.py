"""Word F1, exact match and ROUGE-L; expected numbers are counted by hand from the definitions."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench import metrics
from kvbench.harness import own
from kvbench_tasks.coqa.metric import scores as coqa_scores
from kvbench_tasks.longbench.metric import score as longbench_score


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat,\tsat on a mat!", "cat sat on mat"),
        ("the-end", "theend"),  # punctuation goes first: this is no article
        ("An apple's a day", "apples day"),
        ("theatre and Anna", "theatre and anna"),  # articles are whole words
        ("Łódź—city", "łódź—city"),  # only ASCII punctuation is dropped
        ("$1,200.50", "120050"),
        ("the", ""),
        ("", ""),
    ],
)
def test_normalisation(text: str, normal: str) -> None:
    assert metrics.normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("The cat sat on the mat.", "a cat sat", 2 * 2 / (4 + 2)),
        ("no no no", "No", 2 * 1 / (3 + 1)),
        ("no no no", "no no", 2 * 2 / (3 + 2)),
        ("Paris", "paris!", 1.0),
        ("naïve NAÏVE", "Naïve", 2 * 1 / (2 + 1)),
        ("Łódź—city", "Łódź", 0.0),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("Paris", "", 0.0),
        ("the", "the", 0.0),  # no words are left on either side
    ],
)
def test_f1(response: str, reference: str, expected: float) -> None:
    assert metrics.f1(response, reference) == pytest.approx(expected)


def test_exact_match() -> None:
    assert metrics.exact_match(" The U.S.A. ", "usa") == 1.0
    assert metrics.exact_match("USA today", "usa") == 0.0
    assert metrics.exact_match("", "the") == 1.0


def test_the_best_reference_counts() -> None:
    best = metrics.best(metrics.f1, "red house", ["blue", "a red red house", "house"])
    assert best == pytest.approx(4 / 5)
    assert metrics.best(metrics.f1, "red", []) == 0.0


# Pieces that the benchmarks treat differently: empty texts, articles, and marks beyond ASCII.
TEXTS = st.lists(
    st.sampled_from(["the", "The", "a", "red", "Red!", "house", "\u201cthe", "an\u2014a", "...", " "]),
    max_size=6,
).map(" ".join)


def slow_f1(found: list[str], wanted: list[str]) -> float:
    """F1 with each shared word crossed out by hand."""
    left = list(wanted)
    for word in found:
        if word in left:
            left.remove(word)
    shared = len(wanted) - len(left)
    if not shared:
        return 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def bare(text: str) -> str:
    return "".join(c for c in text.lower() if c not in string.punctuation)


def squad_words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", bare(text)).split()


@given(TEXTS, TEXTS)
def test_longbench_scores_texts_without_words_0(response: str, reference: str) -> None:
    found, wanted = squad_words(response), squad_words(reference)
    row = {"first_line": False, "measure": "f1", "outputs": [reference]}
    assert longbench_score(row, [response])["score"] == pytest.approx(slow_f1(found, wanted))


@given(TEXTS, TEXTS)
def test_coqa_scores_two_texts_without_words_1(response: str, reference: str) -> None:
    found, wanted = squad_words(response), squad_words(reference)
    expected = slow_f1(found, wanted) if found and wanted else float(found == wanted)
    scores = coqa_scores({"outputs": [reference]}, [response])
    assert scores == {"em": float(found == wanted), "f1": pytest.approx(expected)}


@given(TEXTS, TEXTS)
def test_own_data_keeps_articles_that_touch_other_marks(response: str, reference: str) -> None:
    found, wanted = (
        [word for word in bare(text).split() if word not in ("a", "an", "the")] for text in (response, reference)
    )
    expected = slow_f1(found, wanted) if found and wanted else float(found == wanted)
    assert own.f1(response, [reference]) == pytest.approx(expected)
    assert own.exact(response, [reference]) == float(found == wanted)


def test_an_article_in_curly_quotes_tells_the_two_normalisations_apart() -> None:
    assert metrics.answer_words("\u201cThe end") == ["\u201c", "end"]
    assert metrics.answer_words("\u201cThe end", split_first=True) == ["\u201cthe", "end"]


@pytest.mark.slow
@given(TEXTS, TEXTS)
def test_rouge_l_is_that_of_rouge_score(response: str, reference: str) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    expected = RougeScorer(["rougeL"]).score(reference, response)["rougeL"].fmeasure
    assert metrics.rouge_l(response, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "references", "expected"),
    [
        ("police killed the gunman", ["police kill the gunman"], 3 / 4),
        ("The CAT!", ["the cat"], 1.0),
        # The union is over lines, and a word counts as often as it occurs: 4 of 10, 4 of 5.
        ("w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", ["w1 w2 w3 w4 w5"], 2 * 4 / (10 + 5)),
        ("w2\nw1", ["w1 w2"], 1.0),
        ("w2. w1", ["w1 w2"], 2 * 1 / (2 + 2)),  # a full stop does not end a sentence
        ("a b", ["c", "a b c d", "b"], 2 * 2 / (2 + 4)),
        ("", ["a"], 0.0),
        ("a", [""], 0.0),
    ],
)
def test_rouge_lsum(response: str, references: list[str], expected: float) -> None:
    assert metrics.rouge_lsum(response, references) == pytest.approx(expected)
