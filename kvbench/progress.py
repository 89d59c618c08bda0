"""Progress reporters for logs and terminals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.text import Text

from kvbench.terminal import print_message


class Reporter(Protocol):
    """Progress reporter. May report several tasks, one after the other."""

    def start(self, total_units: int, description: str) -> None:
        """Start a task and end an unfinished one.

        Args:
            total_units: Units of work, for example responses.
            description: The task in a few words.
        """
        ...

    def advance(self, n: int = 1) -> None:
        """Count `n` more units as done."""
        ...

    def message(self, text: str) -> None:
        """Print a permanent line."""
        ...

    def stop(self) -> None:
        """End the task, finished or not. May be called at any time, also repeatedly."""
        ...


class Silent:
    """Reporter without output."""

    def busy(self, text: str) -> None:
        """See `Bar`."""

    def start(self, total_units: int, description: str) -> None:
        """See `Reporter`."""

    def advance(self, n: int = 1) -> None:
        """See `Reporter`."""

    def message(self, text: str) -> None:
        """See `Reporter`."""

    def stop(self) -> None:
        """See `Reporter`."""


class LineProgress:
    """Reporter that writes a plain line at intervals, for logs and pipes.

    Args:
        write: Writes a line.
        min_interval: Minimum time between two lines, in seconds.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        min_interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._every = min_interval
        self._clock = clock
        self._running = False
        self._description = ""
        self._done = self._total = 0
        self._began = self._last_written = 0.0

    def busy(self, text: str) -> None:
        """See `Bar`. Writes nothing, because a log line follows when loading is done."""

    def start(self, total_units: int, description: str) -> None:
        """See `Reporter`."""
        self.stop()
        self._running, self._description = True, description
        self._done, self._total = 0, total_units
        self._began = self._last_written = self._clock()

    def advance(self, n: int = 1) -> None:
        """See `Reporter`."""
        self._done += n
        clock_time = self._clock()
        if self._running and self._done < self._total and clock_time - self._last_written >= self._every:
            self._last_written = clock_time
            seconds_left = (clock_time - self._began) / self._done * (self._total - self._done)
            self._write(f"{self._description}: {self._done}/{self._total}, {duration(seconds_left)} left")

    def message(self, text: str) -> None:
        """See `Reporter`."""
        self._write(text)

    def stop(self) -> None:
        """See `Reporter`."""
        if self._running and self._done:
            elapsed_text = duration(self._clock() - self._began)
            self._write(f"{self._description}: {self._done}/{self._total} in {elapsed_text}")
        self._running = False


class Bar:
    """Reporter that draws a progress bar with the remaining time, for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
        )
        self._bar: Progress | None = None
        self._status: Status | None = None

    def busy(self, text: str) -> None:
        """Show a spinner with a text until the first task starts."""
        self.stop()
        self._status = self._console.status(Text(text))
        self._status.start()

    def start(self, total_units: int, description: str) -> None:
        """See `Reporter`."""
        self.stop()
        self._bar = Progress(*self._columns, console=self._console)
        self._bar.add_task(description, total=total_units)
        self._bar.start()

    def advance(self, n: int = 1) -> None:
        """See `Reporter`."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], n)

    def message(self, text: str) -> None:
        """See `Reporter`."""
        print_message(self._console, text)

    def stop(self) -> None:
        """See `Reporter`."""
        if self._bar is not None:
            self._bar.stop()
        if self._status is not None:
            self._status.stop()
        self._bar = self._status = None


class Late:
    """A task that is reported only if it takes longer than `AFTER`, since most are quick.

    Args:
        reporter: Progress reporter, or None.
        total_units, description: See `Reporter.start`.
        clock: Returns the time in seconds.
    """

    AFTER = 3.0
    """Seconds before progress is reported."""

    def __init__(
        self,
        reporter: Reporter | None,
        total_units: int,
        description: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reporter, self._clock = reporter, clock
        self._total, self._description = total_units, description
        self._began, self._done, self._has_started = clock(), 0, False

    def advance(self) -> None:
        """Count a unit as done."""
        self._done += 1
        if self._has_started and self._reporter is not None:
            self._reporter.advance()
        elif self._reporter is not None and self._clock() - self._began >= self.AFTER:
            self._has_started = True
            self._reporter.start(self._total, self._description)
            self._reporter.advance(self._done)

    def stop(self) -> None:
        """End the task."""
        if self._has_started and self._reporter is not None:
            self._reporter.stop()
        self._has_started = False


def duration(seconds: float) -> str:
    """Format seconds as `42 s`, `3 min 20 s` or `2 h 5 min`."""
    total_seconds = round(seconds)
    if total_seconds < 60:
        return f"{total_seconds} s"
    minutes, remainder = divmod(total_seconds, 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def reporter(console: Console) -> Bar | LineProgress:
    """Return a bar if the console is a terminal, else a reporter of plain lines."""
    if console.is_terminal:
        return Bar(console)
    return LineProgress(lambda message: print_message(console, message))
