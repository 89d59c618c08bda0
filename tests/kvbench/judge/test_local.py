from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.benchmark import Ask
from kvbench.errors import UserError
from kvbench.judge.base import JudgeError, LocalJudge, alike


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("It was in Rome, I think.", "Rome", True),
        ("Rome, in ITALY!", "In Rome", True),  # F1: 2*2/(3+2) = 0.8
        ("in the Rome", "In Rome.", True),  # articles and case do not count
        ("a romance", "Rome", False),  # words, not letters
        ("119 days", "19 days", False),  # 2*1/(2+2) = 0.5, not above 0.5
        ("one two three four", "one five six seven", False),  # 2*1/(4+4) = 0.25
        ("one two three", "one two six", True),  # 2*2/(3+3) = 0.67
        ("", "Rome", False),
        ("", "", True),
        ("anything at all", "the", False),  # no response contains an answer of articles only
    ],
)
def test_the_rule_of_the_local_judge(response: str, answer: str, right: bool) -> None:
    assert alike(response, answer) is right


def test_the_local_judge_is_deterministic_and_names_itself() -> None:
    judge = LocalJudge()
    fields = {"question": "q", "answer": "Rome"}
    asks = [Ask("correct", {**fields, "response": r}) for r in ("In Rome.", "In Oslo.")]
    assert judge.judge(asks) == judge.judge(asks) == [{"score": 1.0}, {"score": 0.0}]
    assert judge.mark == "local judge"
    assert "do not compare them with those of a model" in judge.notice


def test_a_missing_field_is_an_error() -> None:
    with pytest.raises(UserError, match="rubric correct: the field 'question' must be a text"):
        LocalJudge().judge([Ask("correct", {"answer": "Rome", "response": "Rome"})])


def test_ratings_are_the_share_of_common_words(tmp_path: Path) -> None:
    file = tmp_path / "rated.json"
    data = {"version": "1", "source": "", "licence": "", "parse": "ratings", "max_tokens": 5}
    prompt = {"ratings": ["style", "overall"], "template": "{answer} {response}"}
    file.write_text(json.dumps({**data, **prompt}))
    asks = [
        Ask(str(file), {"answer": "red and blue", "response": response})
        for response in ("Red and blue.", "green and red", "none")
    ]
    rated = [{"score": mark, "style": mark} for mark in (1.0, 0.7, 0.1)]
    assert LocalJudge().judge(asks) == rated


def test_a_rubric_beyond_words_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "style.json"
    data = {"version": "1", "source": "", "licence": "", "parse": "yes_no", "max_tokens": 5}
    file.write_text(json.dumps({**data, "template": "Is this polite? {response}"}))
    [verdict] = LocalJudge().judge([Ask(str(file), {"response": "Dear Sir"})])
    assert isinstance(verdict, JudgeError)
    assert "use --judge endpoint" in str(verdict)
