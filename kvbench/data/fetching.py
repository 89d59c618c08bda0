"""Fetching of tables into the hub's caches, and reading them with a check against their records."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

from kvbench.benchmark import Source
from kvbench.data import hub, hub_cache, records
from kvbench.data.records import Damaged, NotFetched, Record, Row
from kvbench.errors import UserError


def rows(
    source: Source,
    cache_dir: Path,
    first: int | None = None,
    where: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
    """Read the rows of a table, fetching it if needed; see `kvbench.data.sources.rows`."""
    try:
        return load(source, cache_dir, first, where)
    except (FileNotFoundError, Damaged):
        record = fetch(source, cache_dir)
    if hub_problem := hub.unreachable():
        warnings.warn(
            f"{source.label} is read from the Hugging Face cache at commit {record.revision}, "
            f"because the hub {hub_problem}",
            stacklevel=3,
        )
    return load(source, cache_dir, first, where)


def load(
    source: Source,
    cache_dir: Path,
    first: int | None = None,
    where: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
    """Read the rows of a fetched table; raises the errors of `verify`.

    All rows are compared with their hash, but only the requested ones are held in memory.
    """
    matching_rows: list[Row] = []

    def collect_row(encoded_line: bytes) -> None:
        if (first is None or len(matching_rows) < first) and where(parsed_row := json.loads(encoded_line)):
            matching_rows.append(parsed_row)

    verify(source, cache_dir, collect_row)
    return matching_rows


def verify(source: Source, cache_dir: Path, on_line: Callable[[bytes], object] = lambda line: None) -> Record:
    """Read a fetched table and compare it with its recorded hash.

    Args:
        cache_dir: The cache folder, which holds the record.
        on_line: Called with every row as a line of JSON.

    Raises:
        FileNotFoundError: It has not been fetched, or the hub's caches no longer hold it.
        Damaged: The rows do not match their hash.
        UserError: They cannot be read.
    """
    record = records.head(source, cache_dir)
    if record is None:
        raise FileNotFoundError(f"{source.label} has not been fetched")
    if record.cached:
        location = f"{source.label} in the Hugging Face cache"
        stored_lines = records.lines(source, hub_cache.read(source, record.revision))
    else:
        location = str(records.path(source, cache_dir))
        stored_lines = records.kept_lines(source, cache_dir)
    try:
        actual_hash = records.measure(stored_lines, on_line).sha256
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as error:  # a reader can raise anything for rows that it once could read
        if isinstance(error, OSError) and error.errno:  # pyarrow's errors about content have no errno
            raise UserError(f"cannot read {location}: {error}") from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Damaged(f"{location} is damaged: {reason}") from None
    if actual_hash != record.sha256:
        raise Damaged(f"{location} is damaged: its content does not match its hash")
    return record


def fetch(
    source: Source,
    cache_dir: Path,
    *,
    fresh: bool = False,
    on_row: Callable[[], object] = lambda: None,
) -> Record:
    """Download a table with the hub's clients, and record it.

    If the hub is unavailable, a cached commit is recorded.

    Args:
        cache_dir: The cache folder, which holds the record.
        fresh: Whether to fetch the newest commit even if the table has been fetched.
        on_row: Called for every row.

    Raises:
        NotFetched: No cache holds the table, and the hub does not provide it.
        UserError: The table lacks a column, or this machine cannot store it.
    """
    damage = ""
    try:
        record = verify(source, cache_dir)
        if not fresh:
            return record
    except FileNotFoundError:
        pass
    except Damaged as error:
        damage = f"{error}; it "
    hub_problem = hub.unreachable()
    if not hub_problem:
        with hub_cache.reasons(source):
            commit = hub_cache.download(source, force=bool(damage))
            return _record(source, commit, cache_dir, on_row)
    message = f"{damage}needs the dataset {source.dataset} from {hub_cache.HUB}, which {hub_problem}"
    for commit in [] if fresh or damage else hub_cache.cached_commits(source):
        try:
            with hub_cache.reasons(source):
                return _record(source, commit, cache_dir, on_row)
        except NotFetched as error:
            message = f"{error} (commit {commit[:12]} in its cache; the hub {hub_problem})"
    raise NotFetched(message)


def _record(source: Source, commit: str, cache_dir: Path, on_row: Callable[[], object]) -> Record:
    encoded_lines = records.lines(source, hub_cache.read(source, commit))
    record = records.measure(encoded_lines, lambda line: on_row(), revision=commit, cached=True)
    records.write(source, record, cache_dir)
    return record
