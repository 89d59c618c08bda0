"""What every command shares on the terminal: exit codes, consoles, messages and progress."""

from __future__ import annotations

import json
import os
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
"""Exit codes: success; a cell or a check failed, or stdout cannot be written; wrong input; Ctrl-C;
the reader of a pipe has gone."""


def console() -> Console:
    """Stdout; a pipe or a file gets a width that fits a table."""
    rich_console = terminal.console()
    if not rich_console.is_terminal and "COLUMNS" not in os.environ:
        rich_console = terminal.console(width=140)
    return rich_console


def show(table: Table) -> None:
    """Print a table on stdout, in as many parts as the width asks for."""
    rich_console = console()
    for table_block in fitted(table, rich_console):
        rich_console.print(table_block)


def progress() -> Bar | LineProgress:
    """Progress on stderr: a bar on a terminal, lines in a log."""
    return reporter(terminal.console(stderr=True))


@contextmanager
def stopping(reporter: Reporter, stop_note: str = "") -> Iterator[None]:
    """Stop the progress at the end of a command's work.

    Args:
        reporter: The progress.
        stop_note: What Ctrl-C leaves behind, for the user; if empty, nothing is said.
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
    """Print an error as one line on stderr; return the exit code for wrong input."""
    print(f"kvbench: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return MISUSE


def print_json(document: Any) -> None:
    """Print a value as JSON in ASCII, so that every terminal and pipe can carry it."""
    print(json.dumps(document, indent=2, allow_nan=False))


def rows_of(frame: Any) -> list[dict[str, Any]]:
    """The rows of a data frame as JSON can hold them: what is not a finite number is null."""
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return records
