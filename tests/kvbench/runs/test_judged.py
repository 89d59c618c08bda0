"""The tables of tasks whose responses are judged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvbench.benchmark import Ask, Marks
from kvbench.errors import UserError
from kvbench.harness.protocol import Key, LoadedTask, MetricScores, Request
from kvbench.judge.base import JudgeError, LocalJudge, Verdict
from kvbench.judge.rubrics import origin
from kvbench.runs.planning import Job
from kvbench.runs.results import scored
from kvbench.runs.schema import Response

from .cells import make_cell


class Counting(LocalJudge):
    """Records how many asks come together; has no verdict on the responses in `fails`."""

    def __init__(self, *fails: str) -> None:
        self.batches: list[int] = []
        self.fails = fails

    def judge(self, asks: Sequence[Ask]) -> list[Verdict]:
        self.batches.append(len(asks))
        return [
            JudgeError("it said maybe") if ask.fields["response"] in self.fails else verdict
            for ask, verdict in zip(asks, super().judge(asks), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Quiz(LoadedTask):
    def asks(self, responses: Mapping[Key, str]) -> list[Ask]:
        fields = {"question": "Where?", "answer": "Rome"}
        return [Ask("correct", {**fields, "response": text}) for text in responses.values()]

    def score_metrics(self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None) -> list[MetricScores]:
        assert marks is not None
        scores = {key: mark["score"] for key, mark in zip(responses, marks, strict=True)}
        return [MetricScores("accuracy", "", True, scores, sum(scores.values()) / len(scores))]


def row(judge: LocalJudge, *texts: str) -> dict[str, Any]:
    """The row of a cell; its responses are stored in reverse order."""
    requests = tuple(Request("t", f"{i}", i, 0, f"context{i}", "c", "q", (), 4, ("x",)) for i in range(len(texts)))
    task = Quiz("t", "g", "1", "d", "accuracy", True, 0.0, 64, requests, rubric="correct")
    cell = make_cell("full", "0.5", task="t", group="g", length=64)
    responses = [
        Response(
            cell.cell, f"{i}", i, 0, 0, f"context{i}", text, "stop", "",
            60, 4, 2, 10, 10, 80, 80, 100, 160, 0, 0, 0.5, 0.25, 1.0,
        )
        for i, text in enumerate(texts)
    ]  # fmt: skip
    [only] = scored([Job(task, [], [cell], judge)], lambda _: responses[::-1])
    return only.row


def test_the_responses_of_a_cell_are_judged_together() -> None:
    judge = Counting()
    assert row(judge, "Rome", "Oslo", "Rome", "in Rome")["score"] == 3 / 4
    assert judge.batches == [4]


def test_missing_verdicts_are_counted_and_the_first_is_named() -> None:
    failed = row(Counting("Oslo", "Bergen"), "Rome", "Oslo", "Bergen")
    assert failed["status"] == "error"
    assert failed["error"] == ("2 of 3 responses have no verdict: sample 1, question 0: it said maybe")
    assert row(Counting("Oslo"), "Oslo")["error"] == "sample 0, question 0: it said maybe"


def test_an_error_of_the_user_ends_the_scoring() -> None:
    class Full(LocalJudge):
        def judge(self, asks: Sequence[Ask]) -> list[Verdict]:
            raise UserError("cannot write a.jsonl: No space left on device")

    with pytest.raises(UserError, match="No space left"):
        row(Full(), "Rome")


def test_a_row_names_its_judge() -> None:
    judged = row(LocalJudge(), "Rome")
    assert judged["metric"] == "accuracy (local judge)"
    versions = json.loads(judged["versions"])
    assert versions["judge"] == "local judge 1"
    assert versions["rubric"] == origin("correct")

    class Other(LocalJudge):
        mark = "another judge"

    assert row(Other(), "Rome")["match"] != judged["match"] == row(LocalJudge(), "Oslo")["match"]
