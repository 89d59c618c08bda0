"""The judge interface, and a deterministic judge that needs no model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from kvbench.benchmark import Ask, Marks
from kvbench.errors import UserError
from kvbench.judge.rubrics import rubric
from kvbench.metrics import answer_words, f1_words


class JudgeError(UserError):
    """Error of a judge without a verdict. The message is one line and never contains a key."""


Verdict = Marks | JudgeError
"""A judge's answer to an `Ask`, or the reason why there is none."""


class Judge(Protocol):
    """Gives verdicts.

    Attributes:
        mark: Suffix of the metric's name in the results, such as `judge gpt-4o`.
        origin: Identifies the judge in `versions` of the results.
        notice: One line on who judges and what that implies; it follows "<task> is ".
    """

    mark: str
    origin: str
    notice: str

    def check(self) -> None:
        """Try the judge before anything is generated.

        Raises:
            JudgeError: It gives no verdicts.
        """
        ...

    def judge(self, asks: Sequence[Ask]) -> list[Verdict]:
        """Return one verdict per ask, in the same order; the asks may have different rubrics."""
        ...


class LocalJudge:
    """Compares words with the reference answer: deterministic, without network or understanding.

    For tests and trials only. A verdict is `alike`; a rating is ten times the `shared` F1 of the words, at least 1, the
    same for all criteria.
    """

    mark = "local judge"
    origin = "local judge 1"
    notice = (
        "judged locally by words shared with the reference answer: "
        "use these scores for trials only, and do not compare them with those of a model"
    )

    def check(self) -> None:
        """Do nothing: this judge cannot fail. See `Judge`."""

    def judge(self, asks: Sequence[Ask]) -> list[Verdict]:
        """Return the verdicts; see `Judge`."""
        return [self._verdict(ask) for ask in asks]

    def _verdict(self, ask: Ask) -> Verdict:
        criterion = rubric(ask.rubric)
        criterion.render(ask.fields)  # checks the fields
        if not {"answer", "response"} <= set(criterion.fields):
            return JudgeError(
                f"the local judge cannot apply rubric {ask.rubric}, because it does not compare "
                "{response} with {answer}; use --judge endpoint"
            )
        response, answer = ask.fields["response"], ask.fields["answer"]
        if criterion.ratings:
            rating = max(1, round(10 * shared(response, answer))) / 10
            return {"score": rating, **dict.fromkeys(criterion.ratings[:-1], rating)}
        return {"score": float(alike(response, answer))}


def alike(response: str, answer: str) -> bool:
    """Return whether a response contains all words of an answer in a row, or their F1 is above 0.5.

    Case, punctuation and articles do not count.
    """
    response_text, answer_text = (f" {' '.join(_words(phrase))} " for phrase in (response, answer))
    if answer_text.strip() and answer_text in response_text:
        return True
    return shared(response, answer) > 0.5


def shared(response: str, answer: str) -> float:
    """Return the F1 of the words that a response shares with an answer."""
    word_lists = (answer_words(phrase, split_first=True) for phrase in (response, answer))
    return f1_words(*word_lists, both_empty=1.0)


def _words(text: str) -> list[str]:
    """Split at any punctuation, unlike `answer_words`, which joins "well-known"."""
    return [word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the")]
