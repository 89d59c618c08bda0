"""Which judge a run has: the flag, then the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import UserError, nearest
from kvbench.judge.base import Judge, LocalJudge, NeedsJudge
from kvbench.judge.rubrics import origin
from kvbench.judge.settings import KIND, MODEL, URL, read

if TYPE_CHECKING:
    from kvbench.benchmark import Benchmark

JUDGES = ("auto", "local", "endpoint")
"""What `--judge` and `KVBENCH_JUDGE` can say."""


def judge_name(value: object) -> str:
    """Read the name of a judge.

    Raises:
        UserError: There is none of this name.
    """
    if value not in JUDGES:
        hint = nearest(str(value), JUDGES) or f"; there are {', '.join(JUDGES)}"
        raise UserError(f"unknown judge {value!r}{hint}")
    return str(value)


def choose(
    how: str = "auto", say: Callable[[str], None] = lambda text: None, folder: Path | None = None
) -> Judge:
    """Choose the judge.

    Args:
        how: "local", "endpoint", or "auto": what `KVBENCH_JUDGE` says, else the endpoint that
            `KVBENCH_JUDGE_URL` names.
        say: Told of what takes long.
        folder: Where answers are kept; None for `judge` in the cache of kvbench.

    Raises:
        NeedsJudge: None is configured.
        UserError: A variable is wrong.
    """
    how = judge_name(how)
    if how == "auto" and (wanted := os.environ.get(KIND, "").strip()):
        try:
            how = judge_name(wanted)
        except UserError as error:
            raise UserError(f"{KIND}: {error}") from None
    if how == "local":
        return LocalJudge()
    if not os.environ.get(URL, "").strip():
        raise NeedsJudge(
            f"it needs a judge: set {URL} and {MODEL} (docs/judge.md), or take --judge local, "
            "whose scores are for trying things out"
        )
    from kvbench.files import cache_dir
    from kvbench.judge.endpoint import EndpointJudge

    return EndpointJudge(read(), folder or cache_dir() / "judge", say)


class Judges:
    """The judge of a run, chosen when the first task asks for one.

    Args:
        how: See `choose`.
        say: Told who judges what, and of what takes long.
    """

    def __init__(self, how: str, say: Callable[[str], None]) -> None:
        self._how = how
        self._say = say
        self._judge: Judge | None = None
        self._announced: set[str] = set()

    def of(self, benchmark: Benchmark) -> Judge | None:
        """Who judges the responses of a benchmark; None where its metric asks nobody.

        Raises:
            NeedsJudge: It needs a judge and none is configured.
            UserError: A variable is wrong, or there is no such rubric.
        """
        if not benchmark.judge:
            return None
        origin(benchmark.judge)
        if self._judge is None:
            self._judge = choose(self._how, self._say)
        return self._judge

    def announce(self, benchmark: Benchmark) -> None:
        """Say, once a benchmark, who judges it."""
        if benchmark.judge and self._judge and benchmark.name not in self._announced:
            self._announced.add(benchmark.name)
            self._say(f"{benchmark.name} is {self._judge.notice()}")


def check_judges(judges: Iterable[Judge | None]) -> None:
    """Try each judge once, before hours go into responses that nobody could judge.

    Raises:
        JudgeError: One gives no verdicts.
    """
    for judge in dict.fromkeys(judges):
        if judge is not None:
            judge.check()
