"""For task authors: names tables of the Hugging Face hub, reads them, and stores test data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from kvbench.benchmark import Source
from kvbench.data.records import NotFetched, Row, keep

__all__ = ["NotFetched", "Row", "Source", "hinting", "keep", "rows"]


def rows(
    source: Source,
    cache_dir: Path,
    first: int | None = None,
    where: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
    """Read the raw rows of a table, fetching it first if necessary.

    Images stay encoded: `{"bytes": base64, "path": name or null}`; see `kvbench.data.media`.

    Args:
        cache_dir: The cache folder, which holds the record of the table.
        first: Number of rows to return; None returns all.
        where: Row filter; rejected rows do not count towards `first`.

    Raises:
        NotFetched: No cache holds the table, and the hub does not provide it.
        UserError: The table lacks a column, or this machine cannot store it.
    """
    # Importing `datasets` takes over a second, and `kvbench list tasks` imports this module too.
    from kvbench.data import fetching

    return fetching.rows(source, cache_dir, first, where)


@contextlib.contextmanager
def hinting(task_name: str) -> Iterator[None]:
    """Add to a `NotFetched` error the command that fetches the tables of a task."""
    try:
        yield
    except NotFetched as error:
        raise NotFetched(f"{error}; `kvbench data fetch {task_name}` gets it") from error
