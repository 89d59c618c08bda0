"""How a benchmark ends on wrong input: as `kvbench` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.errors import UserError


@contextmanager
def refused() -> Iterator[None]:
    """Print an error that the user can fix in one line, and exit with status 2; also a decorator."""
    try:
        yield
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
