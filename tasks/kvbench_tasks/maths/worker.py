"""Worker process of `verifier.py`: reads JSON pairs [reference, answer], writes "yes" or "no".

They are compared by math-verify, or by `is_equal` of the Python file given as argument.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Callable

from kvbench.harness.optional import provide_latex2sympy2

_BYTES = 4 << 30
_SECONDS = 60
"""Seconds after which an alarm ends the process, even if its parent is gone."""


def main() -> None:
    """Serve until the input ends, with limited memory if the system supports it."""
    verdict_stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not be taken for an answer
    try:
        import resource  # POSIX only

        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    except (ImportError, ValueError, OSError):
        pass
    try:
        logging.disable(logging.CRITICAL)
        compare = _load_comparison(sys.argv[1]) if sys.argv[1:] else _verify
        compare("1", "1")  # here, so that a failing import is reported in one line
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=verdict_stream, flush=True)
        return
    print("ready", file=verdict_stream, flush=True)
    for line in sys.stdin:
        reference, answer = json.loads(line)
        _alarm(_SECONDS)
        verdict = "yes" if _same(compare, reference, answer) else "no"
        _alarm(0)
        print(verdict, file=verdict_stream, flush=True)


def _alarm(seconds: int) -> None:
    """Let the system end the process after `seconds`; 0 cancels the alarm."""
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)


def _same(compare: Callable[[str, str], object], reference: str, answer: str) -> bool:
    try:
        return bool(compare(reference, answer))
    except Exception:  # sympy raises all kinds of errors; what cannot be compared is not equal
        return False


def _load_comparison(path: str) -> Callable[[str, str], object]:
    """Load the function `is_equal` from a file of lmms-eval."""
    provide_latex2sympy2()
    module_spec = importlib.util.spec_from_file_location("comparison", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    compare: Callable[[str, str], object] = module.is_equal
    return compare


def _verify(reference: str, answer: str) -> object:
    import math_verify  # see main

    return math_verify.verify(_parse(reference), _parse(answer), timeout_seconds=None)


def _parse(expression: str) -> object:
    import math_verify  # see main

    return math_verify.parse(f"\\boxed{{{expression}}}", parsing_timeout=None)


if __name__ == "__main__":
    main()
