"""Progress reporters for logs and terminals."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.status import Status
from rich.text import Text

from kvbench.terminal import print_message


class Reporter(Protocol):
    """Progress reporter. May report several tasks, one after the other."""

    def busy(self, text: str) -> None:
        """Say what is done before the first task, such as loading a model."""
        ...

    def start(self, total_units: int, description: str, unit: str = "") -> None:
        """Start a task and end an unfinished one.

        Args:
            total_units: Units of work, for example responses.
            description: The task in a few words.
            unit: What is counted, as a plural; "" if the description says it.
        """
        ...

    def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
        """Count `n` more units as done.

        Args:
            n: Number of units.
            seconds_left: Estimate of the time left; None: in proportion to the units.
        """
        ...

    def phase(self, name: str) -> None:
        """Name what is being done within the task, such as `prefill`."""
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
        """See `Reporter`."""

    def start(self, total_units: int, description: str, unit: str = "") -> None:
        """See `Reporter`."""

    def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
        """See `Reporter`."""

    def phase(self, name: str) -> None:
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
        self._description = self._unit = self._phase = ""
        self._done = self._total = 0
        self._began = self._last_written = 0.0

    def busy(self, text: str) -> None:
        """See `Reporter`. Writes nothing, because a log line follows when loading is done."""

    def start(self, total_units: int, description: str, unit: str = "") -> None:
        """See `Reporter`."""
        self.stop()
        self._running, self._description, self._unit = True, description, f" {unit}" if unit else ""
        self._done, self._total, self._phase = 0, total_units, ""
        self._began = self._last_written = self._clock()

    def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
        """See `Reporter`."""
        self._done += n
        clock_time = self._clock()
        if self._running and self._done < self._total and clock_time - self._last_written >= self._every:
            self._last_written = clock_time
            if seconds_left is None:
                seconds_left = (clock_time - self._began) / self._done * (self._total - self._done)
            phase_text = f"{self._phase}, " if self._phase else ""
            self._write(f"{self._count()}, {phase_text}{duration(seconds_left)} left")

    def phase(self, name: str) -> None:
        """See `Reporter`."""
        self._phase = name

    def _count(self) -> str:
        return f"{self._description}: {self._done}/{self._total}{self._unit}"

    def message(self, text: str) -> None:
        """See `Reporter`."""
        self._write(text)

    def stop(self) -> None:
        """See `Reporter`."""
        if self._running and self._done:
            elapsed_text = duration(self._clock() - self._began)
            self._write(f"{self._count()} in {elapsed_text}")
        self._running = False


class _CountColumn(ProgressColumn):
    """Finished and all units, with their name."""

    def render(self, task: Task) -> Text:
        """Return the text of a task."""
        return Text(f"{int(task.completed)}/{int(task.total or 0)} {task.fields['unit']}".rstrip(), "progress.download")


class _LeftColumn(ProgressColumn):
    """Elapsed time and time left, as minutes and seconds."""

    def render(self, task: Task) -> Text:
        """Return the text of a task; its field `end` is the estimated end of the task on its own clock."""
        seconds_left = task.time_remaining
        if task.fields["end"] is not None:
            seconds_left = max(0.0, task.fields["end"] - task.get_time())
        elapsed_text = _clock_time(task.finished_time if task.finished else task.elapsed)
        return Text(elapsed_text if task.finished else f"{elapsed_text}, {_clock_time(seconds_left)} left")


def _clock_time(seconds: float | None) -> str:
    """Format seconds as `0:42` or `2:05:00`; dashes if they are unknown."""
    if seconds is None:
        return "-:--"
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


class Bar:
    """Reporter that draws a progress bar with the phase and the remaining time, for terminals.

    Args:
        console: Where it is drawn.
        clock: Returns the time in seconds.
    """

    _REDRAWN = 0.1
    """Seconds between two updates. Each takes tens of microseconds, and a forward of a small model milliseconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: Progress | None = None
        self._status: Status | None = None
        self._counted, self._last_update = 0, 0.0
        self._description = self._phase = ""
        self._seconds_left: float | None = None

    def busy(self, text: str) -> None:
        """See `Reporter`. Shows a spinner."""
        self.stop()
        self._status = self._console.status(Text(text))
        self._status.start()

    def start(self, total_units: int, description: str, unit: str = "") -> None:
        """See `Reporter`."""
        self.stop()
        bar_width = max(8, min(40, self._console.width - 70))  # the text beside it stays on one line
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width),
            _CountColumn(),
            _LeftColumn(),
            console=self._console,
            get_time=self._clock,
        )
        self._description, self._phase = description, ""
        self._counted, self._seconds_left, self._last_update = 0, None, self._clock()
        self._bar.add_task(description, total=total_units, unit=unit, end=None)
        self._bar.start()

    def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
        """See `Reporter`."""
        self._counted, self._seconds_left = self._counted + n, seconds_left
        self._update()

    def phase(self, name: str) -> None:
        """See `Reporter`."""
        self._phase = name
        self._update()

    def _update(self, *, is_last: bool = False) -> None:
        """Show what has changed, unless the last update was just before."""
        clock_time = self._clock()
        if self._bar is None or (clock_time - self._last_update < self._REDRAWN and not is_last):
            return
        self._last_update = clock_time
        description = self._description
        if self._phase and not is_last:
            description = f"{description}: {self._phase}"
        end = None if self._seconds_left is None else clock_time + self._seconds_left
        self._bar.update(self._bar.task_ids[0], advance=self._counted, description=description, end=end)
        self._counted = 0

    def message(self, text: str) -> None:
        """See `Reporter`."""
        print_message(self._console, text)

    def stop(self) -> None:
        """See `Reporter`."""
        if self._bar is not None:
            self._update(is_last=True)
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
