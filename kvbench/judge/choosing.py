"""Choice of a run's judge: by the flag, otherwise by the environment."""

from __future__ import annotations

import os
from collections.abc import Callable

from kvbench.errors import LeftOut, unknown
from kvbench.files import cache_dir
from kvbench.judge.base import Judge, LocalJudge
from kvbench.judge.client import EndpointJudge
from kvbench.judge.settings import KIND, MODEL, URL, read

JUDGES = ("auto", "local", "endpoint")
"""Values of `--judge` and `KVBENCH_JUDGE`."""


def judge_name(value: object, label: str = "judge") -> str:
    """Validate the name of a judge; `label` names it in the message of the UserError."""
    if value not in JUDGES:
        raise unknown(label, value, JUDGES)
    return str(value)


def choose(choice: str = "auto", notify: Callable[[str], None] = lambda text: None) -> Judge:
    """Choose the judge.

    Args:
        choice: One of `JUDGES`; "auto" is the value of `KVBENCH_JUDGE`, or the endpoint.
        notify: Receives messages about progress and waits.

    Raises:
        LeftOut: No judge is configured.
        UserError: A variable is wrong, or the `openai` package is missing.
    """
    choice = judge_name(choice)
    if choice == "auto":
        choice = judge_name(os.environ.get(KIND, "").strip() or "auto", KIND)
    if choice == "local":
        return LocalJudge()
    if not os.environ.get(URL, "").strip():
        raise LeftOut(
            f"no judge is configured; set {URL} and {MODEL} (see docs/judge.md), or use --judge local for a trial"
        )
    return EndpointJudge(read(), cache_dir() / "judge", notify)
