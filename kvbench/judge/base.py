"""What a judge is, and the deterministic one that needs no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbench.errors import LeftOut, UserError
from kvbench.judge.rubrics import Marks, Rubric, rubric
from kvbench.metrics import answer_words, f1_words


class JudgeError(UserError):
    """A judge gave no verdict. The message is one line and never holds a key."""


class NeedsJudge(LeftOut):
    """A task needs a judge and none is configured."""


@dataclass(frozen=True)
class Ask:
    """A question to a judge.

    Attributes:
        rubric: Name of the rubric.
        fields: What its prompt is filled in with, as sorted pairs.
    """

    rubric: str
    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, name: str, item: Mapping[str, str]) -> Ask:
        """Make one.

        Raises:
            UserError: There is no such rubric, or the item lacks a field of it.
        """
        found = rubric(name)
        found.render(item)
        return cls(name, tuple(sorted((key, item[key]) for key in found.fields)))

    def resolve(self) -> tuple[Rubric, dict[str, str]]:
        """The rubric and the item."""
        return rubric(self.rubric), dict(self.fields)


Verdict = Marks | JudgeError
"""What became of an `Ask`."""


class Judge(Protocol):
    """Gives verdicts.

    Attributes:
        mark: Joins the metric's name in the results, e.g. `judge gpt-4o`.
        origin: Which judge it is, as `versions` of the results record it.
    """

    @property
    def mark(self) -> str: ...

    @property
    def origin(self) -> str: ...

    def notice(self) -> str:
        """One line that says who judges, and what that means."""
        ...

    def check(self) -> None:
        """Try the judge before anything is generated.

        Raises:
            JudgeError: It gives no verdicts.
        """
        ...

    def judge(self, asks: Sequence[Ask]) -> list[Verdict]:
        """Give a verdict for each question, in their order; they may be of different rubrics."""
        ...


_THRESHOLD = 0.5
_VERDICTS = ("yes_no", "contains_yes")


class LocalJudge:
    """Compares words with the reference answer: deterministic, no network, no understanding.

    A response is right if it contains the reference answer, word by word, or if the F1 of the words
    that both share is above 0.5; case, punctuation and articles do not count. It is for tests
    and for trying things out; its scores stand for nothing else, and are marked.
    """

    mark = "local judge"
    origin = "local judge 1"

    def notice(self) -> str:
        """See `Judge`."""
        return (
            "judged locally by words shared with the reference answer: "
            "scores for trying things out, not to be held against those of a model"
        )

    def check(self) -> None:
        """See `Judge`; there is nothing that could fail."""

    def judge(self, asks: Sequence[Ask]) -> list[Verdict]:
        """See `Judge`."""
        return [self._verdict(*ask.resolve()) for ask in asks]

    def _verdict(self, rubric: Rubric, item: Mapping[str, str]) -> Verdict:
        if rubric.parse not in _VERDICTS or not {"answer", "response"} <= set(rubric.fields):
            return JudgeError(
                f"the local judge cannot judge by rubric {rubric.name}: it needs yes or no and the "
                "fields answer and response; KVBENCH_JUDGE_URL would be right"
            )
        return {"score": float(alike(item["response"], item["answer"]))}


def alike(response: str, answer: str) -> bool:
    """Whether a response contains an answer, or shares enough words with it."""
    said, wanted = (f" {' '.join(_words(text))} " for text in (response, answer))
    if wanted.strip() and wanted in said:
        return True
    words = (answer_words(text, split_first=True) for text in (response, answer))
    return f1_words(*words, both_empty=1.0) > _THRESHOLD


def _words(text: str) -> list[str]:
    return [w for w in re.findall(r"\w+", text.lower()) if w not in ("a", "an", "the")]
