"""Terminal output of all commands: exit codes, consoles, messages and progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from kvbench import terminal
from kvbench.progress import Bar, LineProgress, Reporter, reporter
from kvbench.tables.outputs import fitted

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.tables.table import Table

OK, FAILED, MISUSE, INTERRUPTED, CLOSED = 0, 1, 2, 130, 141
"""Exit codes: success; a cell or a check failed, or stdout cannot be written; invalid input; Ctrl-C; closed pipe."""


def console() -> Console:
    """Return a console on stdout; for a pipe or a file, wide enough for a table."""
    rich_console = terminal.console()
    if not terminal.is_screen(rich_console):
        rich_console = terminal.console(width=140)
    return rich_console


def show(table: Table) -> None:
    """Print a table on stdout, split into as many parts as the width requires."""
    rich_console = console()
    for table_block in fitted(table, rich_console):
        rich_console.print(table_block)


def say(message: str, style: str = "") -> None:
    """Print a line on stdout, broken at word borders if it is wider than the terminal."""
    terminal.print_message(console(), message, style)


def progress() -> Bar | LineProgress:
    """Return a progress reporter on stderr: a bar on a terminal, lines in a log."""
    return reporter(terminal.console(stderr=True))


@contextmanager
def stopping(reporter: Reporter, stop_note: str = "") -> Iterator[None]:
    """Stop the progress reporter at the end of a command's work.

    Args:
        reporter: Progress reporter.
        stop_note: Printed after Ctrl-C: what was kept; "" prints nothing.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not stop_note:
            raise
        reporter.stop()
        complain(f"stopped; {stop_note}")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        reporter.stop()


def complain(message: str) -> int:
    """Print an error as one line on stderr and return the exit code for invalid input."""
    print(f"kvbench: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return MISUSE


def print_json(document: Any) -> None:
    """Print a value as ASCII JSON, which every terminal and pipe supports."""
    print(json.dumps(document, indent=2, allow_nan=False))


def rows_of(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a data frame as JSON values; non-finite numbers become null."""
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return records
