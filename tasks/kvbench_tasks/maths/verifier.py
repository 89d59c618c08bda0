"""Comparison of expressions in a separate process, so that no expression can hang or exhaust the run.

math-verify's own time limit is an alarm: it works in the main thread only and cannot interrupt a power of large
integers, which may never finish. Here the process is killed to enforce the limit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kvbench.errors import UserError

_WORKER = Path(__file__).parent / "worker.py"
_START = 180.0
"""Seconds that a busy machine may need to import sympy."""


class Verifier:
    """Thread-safe comparison of expressions.

    Attributes:
        seconds: Time limit of one comparison; on timeout the result is "not equal".
        function: Returns a Python file whose `is_equal` compares; None uses math-verify.
    """

    def __init__(self, seconds: float = 10.0, function: Callable[[], Path] | None = None) -> None:
        self.seconds = seconds
        self.function = function
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def __call__(self, reference: str, answer: str) -> bool:
        """Return whether an answer equals the reference; both are LaTeX.

        Raises:
            UserError: The process cannot be started.
        """
        with self._lock:
            process = self._start_process()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([reference, answer]) + "\n")
                process.stdin.flush()
                verdict = self._lines.get(timeout=self.seconds)
            except (OSError, queue.Empty):
                verdict = ""
            if verdict not in ("yes", "no"):  # late, or dead: sympy can exhaust memory or the stack
                self.close()
            return verdict == "yes"

    def close(self) -> None:
        """End the process; the next comparison starts a new one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _start_process(self) -> subprocess.Popen[str]:
        if self._process is not None and self._owner == os.getpid():  # after a fork it belongs to the parent
            if self._process.poll() is None:
                return self._process
            self.close()
        arguments = [] if self.function is None else [str(self.function())]
        process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self._process, self._owner, self._lines = process, os.getpid(), queue.Queue()
        threading.Thread(target=_pass_on, args=(process.stdout, self._lines), daemon=True).start()
        try:
            greeting = self._lines.get(timeout=_START)
        except queue.Empty:
            greeting = ""
        if greeting != "ready":
            self.close()
            raise UserError(
                "math-verify, which compares the answers, does not start: "
                f"{greeting or 'it does not respond'}; try `pip install math-verify "
                "antlr4-python3-runtime==4.11.0`"
            )
        return process


def _pass_on(stream: IO[str], line_queue: queue.Queue[str]) -> None:
    """Forward the process's lines to a queue; an empty line marks the end."""
    with contextlib.suppress(OSError, ValueError):
        for line in stream:
            line_queue.put(line.strip())
    line_queue.put("")


VERIFIER = Verifier()
atexit.register(VERIFIER.close)
