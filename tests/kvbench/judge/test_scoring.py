"""How metrics come by verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvbench.errors import LeftOut, UserError
from kvbench.judge import JudgeError, LocalJudge, choose, marks_of, record, settle, verdicts
from kvbench.judge.base import Ask


class Counting(LocalJudge):
    """Counts how often it is asked, and for how much; `fails` names responses without verdict."""

    def __init__(self, fails: Sequence[str] = ()) -> None:
        self.batches: list[int] = []
        self.fails = fails

    def judge(self, asks: Sequence[Ask]) -> list[Any]:
        self.batches.append(len(asks))
        return [
            JudgeError("it said maybe") if dict(a.fields)["response"] in self.fails else v
            for a, v in zip(asks, super().judge(asks), strict=True)
        ]


def item(response: str) -> dict[str, str]:
    return {"question": "Where?", "answer": "Rome", "response": response}


def metric(response: str) -> float:
    return 10 * verdicts("correct", [item(response)])[0]


NAMES = [f"sample {i}, question 0" for i in range(4)]


def test_a_tasks_verdicts_are_asked_for_at_once() -> None:
    judge = Counting()
    responses = ["Rome", "Oslo", "Rome", "in Rome"]
    assert settle(judge, metric, responses, NAMES) == [10, 0, 10, 10]
    assert judge.batches == [3]


def test_a_metric_may_ask_for_more_than_one_thing_and_go_by_the_answers() -> None:
    judge = Counting()
    seen: list[float] = []

    def careful(response: str) -> float:
        first, second = verdicts("correct", [item(response), item(response + " or so")])
        seen.append(first)
        if first == 1.0:
            return verdicts("longmemeval:multi-session", [item(response)])[0] + second
        return -1.0

    assert settle(judge, careful, ["Rome", "Oslo"], NAMES) == [2.0, -1.0]
    assert judge.batches == [4, 1]
    assert set(seen) == {0.0, 1.0}, "no metric sees a number that no judge gave"


def test_a_metric_that_catches_errors_does_not_catch_the_waiting() -> None:
    def lenient(response: str) -> float:
        try:
            return metric(response)
        except Exception:
            return -1.0

    assert settle(Counting(), lenient, ["Rome"], NAMES) == [10]


def test_what_has_no_verdict_is_named_and_counted() -> None:
    judge = Counting(fails=("Oslo", "Bergen"))
    with pytest.raises(JudgeError) as caught:
        settle(judge, metric, ["Rome", "Oslo", "Bergen"], NAMES)
    assert str(caught.value) == (
        "2 of 3 responses have no verdict: sample 1, question 0: it said maybe"
    )
    with pytest.raises(JudgeError, match=r"^sample 0, question 0: it said maybe$"):
        settle(judge, metric, ["Oslo"], NAMES)


def test_a_metric_without_end_is_stopped() -> None:
    calls = iter(range(10**6))
    with pytest.raises(UserError, match="never asks a judge for the same twice"):
        settle(Counting(), lambda r: metric(f"{r} {next(calls)}"), ["Rome"], NAMES)


def test_an_error_in_a_metric_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        settle(Counting(), lambda r: metric(r) / 0, ["Rome"], NAMES)
    with pytest.raises(UserError, match="needs the text 'answer'"):
        settle(Counting(), lambda r: verdicts("correct", [{"question": r}]), ["Rome"], NAMES)


def test_outside_of_a_run_the_environment_says_who_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVBENCH_JUDGE", "local")
    assert verdicts("correct", [item("Rome"), item("Oslo")]) == [1.0, 0.0]
    assert marks_of("correct", [item("Rome")]) == [{"score": 1.0}]
    monkeypatch.delenv("KVBENCH_JUDGE")
    monkeypatch.delenv("KVBENCH_JUDGE_URL", raising=False)
    with pytest.raises(LeftOut, match="KVBENCH_JUDGE_URL and KVBENCH_JUDGE_MODEL"):
        verdicts("correct", [item("Rome")])


def test_without_a_judge_values_are_just_taken() -> None:
    assert settle(None, len, ["a", "bb"], NAMES) == [1, 2]
    with pytest.raises(UserError, match=r"its Benchmark must say so: judge='longmemeval'"):
        settle(None, lambda r: verdicts("longmemeval:abstention", [item(r)]), ["Rome"], NAMES)


# --- who judges -----------------------------------------------------------------------------------


def test_flag_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_JUDGE", raising=False)
    monkeypatch.setenv("KVBENCH_JUDGE_URL", "http://localhost:1/v1")
    monkeypatch.setenv("KVBENCH_JUDGE_MODEL", "org/model")
    assert choose().mark == "judge org/model"
    assert choose().origin == "org/model at localhost:1"
    assert "are sent there" in choose().notice()
    assert choose("local").mark == "local judge"
    monkeypatch.setenv("KVBENCH_JUDGE", "local")
    assert choose().mark == "local judge"
    assert choose("endpoint").mark == "judge org/model"
    monkeypatch.setenv("KVBENCH_JUDGE", "locl")
    with pytest.raises(UserError, match="KVBENCH_JUDGE: unknown judge 'locl'; did you mean local"):
        choose()
    with pytest.raises(UserError, match="unknown judge 'gpt'; there are auto, local, endpoint"):
        choose("gpt")
    monkeypatch.setenv("KVBENCH_JUDGE_MODEL", "")
    with pytest.raises(UserError, match="KVBENCH_JUDGE_MODEL must name"):
        choose("endpoint")


def test_a_row_says_who_judged() -> None:
    row = {"metric": "accuracy", "match": "0123", "versions": '{"torch": "2"}'}
    found = record(LocalJudge(), "longmemeval", row)
    assert found["metric"] == "accuracy (local judge)"
    versions = json.loads(found["versions"])
    assert versions["torch"] == "2"
    assert versions["judge"] == "local judge 1"
    assert versions["rubric"].startswith("longmemeval 1 (")
    other = record(LocalJudge(), "longmemeval", {**row, "match": "4567"})
    assert len({"0123", found["match"], "4567", other["match"]}) == 4
