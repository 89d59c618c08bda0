"""Runs in processes of their own, for tests that harm them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.runs.file_names import RESPONSES
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute
from kvbench.runs.store import RunStore

_CONTEXT = multiprocessing.get_context("forkserver")
MISUSE, INTERRUPTED = 2, 130


class Child:
    """A run in another process, with the exit status of the command line.

    Args:
        grid: What it runs.
        pause: Appends to the journal after which it waits for a signal; None: it runs to its end.
        file_size: Bytes that a file can have, as if the disk were full then.
        extend: Whether it extends the run in its folder.
    """

    def __init__(
        self,
        grid: Grid,
        pause: int | None = None,
        file_size: int | None = None,
        extend: bool = False,
    ) -> None:
        self.out = grid.path
        _CONTEXT.set_forkserver_preload(["kvbench.runs.runner"])
        self._receiver, sender = _CONTEXT.Pipe(duplex=False)
        given = (grid, pause, file_size, extend, sender, dict(os.environ))
        self.process: Any = _CONTEXT.Process(target=_run, args=given)
        self.process.start()

    def wait_until_it_pauses(self) -> None:
        """Return when it has written what it was to write."""
        assert self._receiver.poll(120), "it has not come so far"
        assert self._receiver.recv() == "paused"

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit status, and the error if it says one."""
        assert self._receiver.poll(600), "it neither ends nor says why"
        try:
            error = self._receiver.recv()
        except EOFError:
            error = ""
        self.process.join()
        return self.process.exitcode, error


def _run(
    grid: Grid,
    pause: int | None,
    file_size: int | None,
    extend: bool,
    sender: Any,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)  # the server that this process is forked from may be older
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if pause is not None:
        _pause_after(pause, sender)
    try:
        execute(grid, extend=extend)
    except UserError as error:
        sender.send(str(error))
        raise SystemExit(MISUSE) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _pause_after(count: int, sender: Any) -> None:
    original = RunStore.append
    left = count

    def append(store: RunStore, responses: Any) -> None:
        nonlocal left
        original(store, responses)
        left -= bool(responses)
        if left == 0:
            sender.send("paused")
            time.sleep(300)

    RunStore.append = append  # type: ignore[method-assign]


def lines(out: Path) -> list[bytes]:
    """The lines of a run's journal."""
    return (out / RESPONSES).read_bytes().splitlines()
