"""Which judge a run uses: the flag decides, then the environment."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvbench.errors import LeftOut, unknown
from kvbench.files import cache_dir
from kvbench.judge.base import Judge, LocalJudge
from kvbench.judge.client import EndpointJudge
from kvbench.judge.settings import KIND, MODEL, URL, read

JUDGES = ("auto", "local", "endpoint")
"""The values of `--judge` and `KVBENCH_JUDGE`."""


def judge_name(value: object, kind: str = "judge") -> str:
    """Check the name of a judge; `kind` names it in the message of the UserError."""
    if value not in JUDGES:
        raise unknown(kind, value, JUDGES)
    return str(value)


def choose(name: str = "auto", say: Callable[[str], None] = lambda text: None) -> Judge:
    """Choose the judge.

    Args:
        name: One of `JUDGES`; "auto" is the value of `KVBENCH_JUDGE`, or the endpoint.
        say: Told of the progress and of waits.

    Raises:
        LeftOut: No judge is configured.
        UserError: A variable is wrong, or the `openai` package is missing.
    """
    name = judge_name(name)
    if name == "auto":
        name = judge_name(os.environ.get(KIND, "").strip() or "auto", KIND)
    if name == "local":
        return LocalJudge()
    if not os.environ.get(URL, "").strip():
        raise LeftOut(
            f"no judge is configured; set {URL} and {MODEL} (see docs/judge.md), "
            "or use --judge local for a trial"
        )
    return EndpointJudge(read(), cache_dir() / "judge", say)
