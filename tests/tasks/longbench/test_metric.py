"""LongBench's measures; expected numbers are counted by hand from their definitions."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench_tasks.longbench.metric import (
    classification,
    count,
    edit_similarity,
    retrieval,
    score,
    similarity,
)


def row(measure: str, outputs: list[str], **more: Any) -> dict[str, Any]:
    return {"measure": measure, "outputs": outputs, "first_line": False, "classes": [], **more}


CLASSES = ["place", "date", "birth place"]


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("Type: date", "date", 1.0),
        ("date or place", "date", 1 / 2),
        ("date", "place", 0.0),
        ("Date", "date", 0.0),  # case stands
        ("birth place", "birth place", 1.0),  # "place" is part of it and does not count
        ("place", "birth place", 0.0),
        ("birth place", "place", 1 / 2),
        ("", "date", 0.0),
    ],
)
def test_classification(response: str, reference: str, expected: float) -> None:
    assert classification(response, reference, CLASSES) == expected


def test_classification_skips_a_check_after_each_class_it_drops() -> None:
    # "place" is dropped, so "birth", which is part of the right one as well, is not looked at.
    classes = ["place", "birth", "birth place"]
    assert classification("birth place", "birth place", classes) == 1 / 2


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("3", 1.0),
        ("3 paragraphs of 4", 1 / 2),
        ("3, 3 or 5", 2 / 3),
        ("33", 0.0),
        ("3.0", 1 / 2),  # two numbers
        ("three", 0.0),
        ("", 0.0),
    ],
)
def test_count(response: str, expected: float) -> None:
    assert count(response, "3") == pytest.approx(expected)
    assert retrieval(response, "Paragraph 3") == pytest.approx(expected)


def test_retrieval_needs_a_paragraph_in_its_reference() -> None:
    with pytest.raises(ValueError, match="names no paragraph"):
        retrieval("3", "3")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("    return x", 1.0),
        ("\n\n    return x\n    more()", 1.0),
        ("```python\n# a comment\n    return x\n", 1.0),
        ("int a; // one\n    return x", 1.0),
        ("return x", 0.8),  # 2 * 8 / (8 + 12)
        ("  \n    return x", 0.29),  # the blank line is the first: 2 * 2 / (2 + 12) = 0.2857
        ("# only\n// comments", 0.0),
        ("", 0.0),
    ],
)
def test_edit_similarity_of_the_first_line_of_code(response: str, expected: float) -> None:
    assert edit_similarity(response, "    return x") == expected


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("return x", "return y", 0.88),  # 2 * 7 / 16 = 0.875, halves to the even hundredth
        ("abcd", "abxd", 0.75),  # "ab" and "d": 2 * 3 / 8
        ("ab", "ba", 0.5),  # one block only: 2 * 1 / 4
        ("tide", "diet", 0.25),  # "t" stands first, and nothing is left of it
        ("diet", "tide", 0.5),  # "d" is found first, then "e": the order of the texts matters
        ("abc", "abc", 1.0),
        ("é=1", "e=1", 0.67),  # 2 * 2 / 6
        ("", "", 1.0),
        ("", "x", 0.0),
        ("x", "", 0.0),
    ],
)
def test_similarity(response: str, reference: str, expected: float) -> None:
    assert similarity(response, reference) == expected


def test_the_best_answer_counts() -> None:
    assert score(row("f1", ["blue", "a red house"]), ["red"]) == {"score": pytest.approx(2 / 3)}
    assert score(row("rouge_l", ["c", "a b"]), ["a"]) == {"score": pytest.approx(2 / 3)}
    assert score(row("count", ["4", "7"]), ["7"]) == {"score": 1.0}
    assert score(row("f1", ["blue"]), [""]) == {"score": 0.0}


def test_few_shot_sets_are_judged_by_their_first_line() -> None:
    response = "\n\ndate\nQuestion: Where ?\nType: place"
    few = row("classification", ["date"], classes=CLASSES, first_line=True)
    assert score(few, [response]) == {"score": 1.0}
    assert score({**few, "first_line": False}, [response]) == {"score": 1 / 2}
    assert score(row("f1", ["Rune"], first_line=True), ["Rune\nPassage: x"]) == {"score": 1.0}
    assert score(row("f1", ["Rune"]), ["Rune\nPassage: x"]) == {"score": pytest.approx(2 / 4)}
    assert score(row("rouge_l", ["a b"], first_line=True), [" \na b"]) == {"score": 0.0}
