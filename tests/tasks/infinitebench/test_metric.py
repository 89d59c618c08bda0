"""InfiniteBench's measures; expected values follow from their definitions by hand."""

from __future__ import annotations

import pytest

from kvbench_tasks.infinitebench import metric

FIRST = ["71432"]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" 71432.", True),
        ("is 71432, not 5", True),
        ("5, not 71432", False),
        ("714320", False),
        ("071432", False),  # digit by digit
        ("none", False),
        ("", False),
    ],
)
def test_first_number(response: str, expected: bool) -> None:
    assert metric.first_number(response, FIRST) is expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('"ce-06".', True),
        ("{ce-06}", True),
        ("it is:ce-06?", True),
        ("ce-061", False),
        ("ce 06", False),
        ("(ce-06)", False),  # parentheses are no marks between words
        ("", False),
    ],
)
def test_word(response: str, expected: bool) -> None:
    assert metric.word(response, ["ce-06"]) is expected


@pytest.mark.parametrize(
    ("response", "expected", "kvpress"),
    [
        ("Ace", True, True),
        (" it is: 'ace'!", True, True),
        ("Ace's", True, True),  # the apostrophe separates words
        ("ACE-ROTH", False, True),  # a hyphen does not
        ("PALACE", False, True),
        ("Bo Émile", False, True),  # the first name counts alone
        ("Orm", False, False),
        ("", False, False),
    ],
)
def test_name(response: str, expected: bool, kvpress: bool) -> None:
    assert metric.name(response, ["ACE", "émile"]) is expected
    assert metric.kvpress_name(response, ["ACE", "émile"]) is kvpress


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (" 93", "93", True),
        ("93.0", "93", True),
        ("93.5", "93", False),
        ("no: 5.5 or 6", "5.5", True),
        ("5", "5.5", False),
        ("-93", "93", True),  # signs are not read
        ("", "93", False),
    ],
)
def test_value(response: str, answer: str, expected: bool) -> None:
    assert metric.value(response, [answer]) is expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("-5", True),
        ("The value is: `-5`.", True),
        ("4 - 9 = -5", True),
        ("-5 it is", False),  # the last word counts
        ("5", False),
        ("-5.0", False),  # parted at the full stop: the last word is 0
        ("", False),
        ("...", False),
    ],
)
def test_last_number(response: str, expected: bool) -> None:
    assert metric.last_number(response, ["-5"]) is expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("[8, 5, 7, 3]", 1.0),
        ("8, 5, 7, 3, 99", 1.0),
        ("[8, 5, 6, 3]", 2 / 4),
        ("8", 1 / 4),
        ("5, 8, 7, 3", 0.0),
        ("-8, 5", 2 / 4),  # signs are not read
        ("08, 5", 2 / 4),
        ("8, " + "5" * 5000, 1 / 4),  # longer than Python reads numbers
        ("", 0.0),
    ],
)
def test_steps(response: str, expected: float) -> None:
    assert metric.steps(response, ["8", "5", "7", "3"]) == expected


def test_steps_never_reach_beyond_a_negative_value() -> None:
    assert metric.steps("1, 21, -9, -5", ["1", "21", "-9", "-5"]) == 2 / 4


@pytest.mark.parametrize(
    ("response", "expected", "kvpress"),
    [
        (" C. Gann", True, True),
        ("C", True, True),
        ("A, no: C", False, True),  # it begins with A; the last letter of the line is C
        ("C, no: A", True, True),
        ("It is C, not A", True, True),  # the first word that is a letter
        ("It is A, not B", False, False),
        ("B\nC", False, False),
        ("So\nC or\nA", True, True),
        ("Gann", True, True),  # the option itself
        ("Can it be A?", True, True),  # it begins with a C, which is the letter
        ("Is it? answer: Gann", True, True),
        ("The answer is Gann!", True, True),
        ("The answer is: the Gann", False, False),
        ("The answer is: the (C)", False, True),
        ("The answer is", False, False),
        ("Gann it is", False, False),
        ("it is Gann", False, False),
        ("c", False, False),
        ("", False, False),
    ],
)
def test_choice(response: str, expected: bool, kvpress: bool) -> None:
    assert metric.choice(response, ["Gann", "C"]) is expected
    assert metric.kvpress_choice(response, ["Gann", "C"]) is kvpress


@pytest.mark.parametrize(
    ("response", "expected", "kvpress"),
    [
        ("C. half", True, True),
        ("C: half", True, True),
        ("C", False, True),  # officially a letter needs its full stop or colon
        ("C half", False, True),
        ("A or C", False, True),
        ("it is C or A", False, False),
        ("half of it", False, True),
        ("`half`", False, False),  # the backtick leaves a space at the beginning
        ("Option C", False, True),
        ("Certainly", False, True),
        ("The error is: half", True, True),
        ("The error is: C", True, True),
        ("The error is: in half", False, False),
        ("the correct option is:", False, False),
        ("area", False, False),
        ("", False, False),
    ],
)
def test_option(response: str, expected: bool, kvpress: bool) -> None:
    assert metric.option(response, ["half", "C"]) is expected
    assert metric.kvpress_option(response, ["half", "C"]) is kvpress


def test_score_takes_the_measure_of_the_row() -> None:
    row = {"measure": "f1", "outputs": ["Mrs. Quill", "blue"]}
    assert metric.score(row, ["the Quill"]) == {"score": pytest.approx(2 / 3)}
    row = {"measure": "rouge_lsum", "outputs": ["a b\nc d"]}
    assert metric.score(row, ["c d\na b"]) == {"score": 1.0}  # lines in any order
    assert metric.score({"measure": "word", "outputs": ["x"]}, ["x"]) == {"score": 1.0}
