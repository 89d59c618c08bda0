"""The other side of `verifier.py`: reads JSON pairs [reference, answer], writes "yes" or "no"."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

_BYTES = 4 << 30
_SECONDS = 60
"""Seconds after which an alarm ends the process, even where nobody waits for it any more."""


def main() -> None:
    """Serve until the input ends; memory is limited where the system can limit it."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    try:
        import resource  # POSIX only

        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    except (ImportError, ValueError, OSError):
        pass
    try:
        import math_verify  # here, so that a failing import is reported in one line

        logging.disable(logging.CRITICAL)
        math_verify.verify(_parsed("1"), _parsed("1"), timeout_seconds=None)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=out, flush=True)
        return
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        _alarm(_SECONDS)
        said = "yes" if _same(gold, answer) else "no"
        _alarm(0)
        print(said, file=out, flush=True)


def _alarm(seconds: int) -> None:
    """Have the system end the process after some seconds; 0 cancels that."""
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)


def _same(gold: str, answer: str) -> bool:
    import math_verify  # see main

    try:
        return bool(math_verify.verify(_parsed(gold), _parsed(answer), timeout_seconds=None))
    except Exception:  # sympy raises errors of all kinds; what cannot be compared is not equal
        return False


def _parsed(text: str) -> object:
    import math_verify  # see main

    return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)


if __name__ == "__main__":
    main()
