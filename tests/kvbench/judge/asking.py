"""Asks the judge behind a URL in tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.benchmark import Ask
from kvbench.judge.base import JudgeError
from kvbench.judge.client import EndpointJudge

from .server import SECRET, Server


def make(server: Server, folder: Path, said: list[str] | None = None, **changes: Any) -> EndpointJudge:
    say = (said if said is not None else []).append
    return EndpointJudge(server.settings(**changes), folder / "judge", say)


def asks(*responses: str, rubric: str = "correct") -> list[Ask]:
    fields = {"question": "Where?", "answer": "Rome"}
    return [Ask(rubric, {**fields, "response": response}) for response in responses]


def scores(verdicts: Sequence[Any]) -> list[float | None]:
    return [None if isinstance(v, JudgeError) else v["score"] for v in verdicts]


def error(judge: EndpointJudge, response: str = "Rome") -> str:
    """The error that a response gets: one line without the key."""
    [verdict] = judge.judge(asks(response))
    assert isinstance(verdict, JudgeError)
    text = str(verdict)
    assert SECRET not in text
    assert "\n" not in text
    return text


def response_in(body: dict[str, Any]) -> str:
    text: str = body["messages"][0]["content"].split("[Response]\n")[1]
    return text.partition("\n\n[End of the response]")[0]
