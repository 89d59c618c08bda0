"""What every command shares on the terminal: exit codes, the console and messages."""

from __future__ import annotations

import os
import sys

from rich.console import Console

OK, FAILED, MISUSE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: success; a cell or a check failed; wrong input; Ctrl-C."""


def console() -> Console:
    """Stdout; a pipe or a file gets a width that fits a table."""
    made = Console()
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = Console(width=140)
    return made


def complain(text: str) -> int:
    """Print an error as one line on stderr; return the exit code for wrong input."""
    print(f"kvbench: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return MISUSE
