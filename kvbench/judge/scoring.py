"""How metrics come by verdicts, and how a task's verdicts are all asked side by side.

A metric calls `verdicts` and is written as if the answer were there. While a task is scored
(`settle`), the first call for an answer that is not there yet ends the metric of that response;
when every response has got that far, all that was asked for is judged at once, and those metrics
run again. So a metric may be run several times, and must ask for the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from kvbench.errors import UserError
from kvbench.files import digest_of
from kvbench.judge.base import Ask, Judge, JudgeError, Verdict
from kvbench.judge.choosing import choose
from kvbench.judge.rubrics import Marks, origin

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")

_ROUNDS = 64


class _Pending(BaseException):
    """Ends a metric whose verdicts are not there yet; no `except Exception` of it catches this."""


class _Session:
    """The verdicts of one task's scoring."""

    def __init__(self, judge: Judge | None) -> None:
        self._judge = judge
        self._known: dict[Ask, Verdict] = {}
        self._wanted: dict[Ask, None] = {}

    def get(self, asks: Sequence[Ask]) -> list[Verdict]:
        if self._judge is None:
            raise UserError(
                f"a metric asks a judge by {asks[0].rubric}, and its Benchmark must say so: "
                f"judge={asks[0].rubric.partition(':')[0]!r}"
            )
        missing = [ask for ask in asks if ask not in self._known]
        if missing:
            self._wanted.update(dict.fromkeys(missing))
            raise _Pending
        return [self._known[ask] for ask in asks]

    def ask(self) -> None:
        assert self._judge is not None
        wanted, self._wanted = list(self._wanted), {}
        self._known.update(zip(wanted, self._judge.judge(wanted), strict=True))


_SESSION: ContextVar[_Session | None] = ContextVar("judge", default=None)


def verdicts(rubric: str, items: Sequence[Mapping[str, str]]) -> list[float]:
    """Have items judged; what a task's metric calls.

    Outside of a run the judge is chosen by the environment and asked at once.

    Args:
        rubric: Name of the rubric, see `kvbench.judge.rubrics.rubric`.
        items: The fields of its prompt, mostly `question`, `answer` (the reference) and `response`.

    Returns:
        A score from 0 to 1 for each.

    Raises:
        JudgeError: An item got no verdict.
        UserError: There is no such rubric, an item lacks a field, or no judge is configured.
    """
    return [marks["score"] for marks in marks_of(rubric, items)]


def marks_of(rubric: str, items: Sequence[Mapping[str, str]]) -> list[Marks]:
    """Have items judged by a rubric of several criteria: all numbers of each. See `verdicts`."""
    asks = [Ask.of(rubric, item) for item in items]
    if not asks:
        return []
    session = _SESSION.get()
    found = session.get(asks) if session is not None else choose().judge(asks)
    given: list[Marks] = []
    for verdict in found:
        if isinstance(verdict, JudgeError):
            raise verdict
        given.append(verdict)
    return given


def settle(
    judge: Judge | None,
    value: Callable[[_Item], _Value],
    items: Sequence[_Item],
    names: Sequence[str],
) -> list[_Value]:
    """Take the value of every item; the verdicts they need are asked for together.

    Args:
        judge: Who judges; None where nothing may be judged.
        value: What calls `verdicts`, or what it calls.
        items: Its arguments.
        names: What messages call the items.

    Raises:
        JudgeError: Some have no verdict; it names the first and counts them.
        UserError: Verdicts are asked for where there is no judge, or without end.
    """
    session = _Session(judge)
    values: dict[int, _Value] = {}
    failed: dict[int, JudgeError] = {}
    left = list(range(len(items)))
    token = _SESSION.set(session)
    try:
        for _ in range(_ROUNDS):
            pending = []
            for i in left:
                try:
                    values[i] = value(items[i])
                except _Pending:
                    pending.append(i)
                except JudgeError as error:
                    failed[i] = error
            if not pending:
                break
            session.ask()
            left = pending
        else:
            raise UserError(f"{names[left[0]]}: its metric never asks a judge for the same twice")
    finally:
        _SESSION.reset(token)
    if failed:
        first = min(failed)
        count = f"{len(failed)} of {len(items)} responses have no verdict: "
        raise JudgeError(f"{count * (len(items) > 1)}{names[first]}: {failed[first]}")
    return [values[i] for i in range(len(items))]


def record(judge: Judge, rubric: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What a judge changes in a row of `cells.parquet`.

    The metric's name says who judges, `versions` say who and by which rubric, and `match` is one of
    its own: scores by different judges are no scores of the same.

    Args:
        judge: Who judges.
        rubric: By what, see `Benchmark.judge`.
        row: The row as it is where nobody judges.
    """
    versions = json.loads(row["versions"]) | {"judge": judge.origin, "rubric": origin(rubric)}
    metric = f"{row['metric']} ({judge.mark})"
    return {
        "metric": metric,
        "versions": json.dumps(versions, sort_keys=True),
        "match": digest_of([row["match"], metric]),
    }
