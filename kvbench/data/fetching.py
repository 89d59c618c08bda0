"""Fetch tables into the hub's caches, read them from there, and compare them with their records."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

from kvbench.benchmark import Source
from kvbench.data import hub_cache, records
from kvbench.data.records import Damaged, NotFetched, Record, Row
from kvbench.errors import UserError


def rows(
    source: Source,
    cache_dir: Path,
    first: int | None = None,
    where: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
    """Read the rows of a table, which is fetched if needed; see `kvbench.data.sources.rows`."""
    try:
        return load(source, cache_dir, first, where)
    except (FileNotFoundError, Damaged):
        record = fetch(source, cache_dir)
    if why := hub_cache.unreachable():
        warnings.warn(
            f"{source.label} is read from the Hugging Face cache at commit {record.revision}, "
            f"because the hub {why}",
            stacklevel=3,
        )
    return load(source, cache_dir, first, where)


def load(
    source: Source,
    cache_dir: Path,
    first: int | None = None,
    where: Callable[[Row], bool] = lambda row: True,
) -> list[Row]:
    """Read the rows of a table that has been fetched; raises what `verify` raises.

    All rows are compared with their hash, but only those wanted are held in memory.
    """
    found: list[Row] = []

    def each(line: bytes) -> None:
        if (first is None or len(found) < first) and where(row := json.loads(line)):
            found.append(row)

    verify(source, cache_dir, each)
    return found


def verify(
    source: Source, cache_dir: Path, each: Callable[[bytes], object] = lambda line: None
) -> Record:
    """Read a table that has been fetched, and compare it with its recorded hash.

    Args:
        source: The table.
        cache_dir: The cache folder, which holds the record.
        each: Called with every row as a line of JSON.

    Raises:
        FileNotFoundError: It has not been fetched, or the hub's caches no longer hold it.
        Damaged: The rows do not match their hash.
        UserError: They cannot be read.
    """
    record = records.head(source, cache_dir)
    if record is None:
        raise FileNotFoundError(f"{source.label} has not been fetched")
    if record.cached:
        place = f"{source.label} in the Hugging Face cache"
        content = records.lines(source, hub_cache.read(source, record.revision))
    else:
        place = str(records.path(source, cache_dir))
        content = records.kept_lines(source, cache_dir)
    try:
        digest = records.measure(content, each).sha256
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as error:  # whatever a reader raises about rows that it once has read
        if isinstance(error, OSError) and error.errno:  # pyarrow's about content have no number
            raise UserError(f"cannot read {place}: {error}") from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Damaged(f"{place} is damaged: {reason}") from None
    if digest != record.sha256:
        raise Damaged(f"{place} is damaged: its content does not match its hash")
    return record


def fetch(
    source: Source,
    cache_dir: Path,
    *,
    fresh: bool = False,
    counted: Callable[[], object] = lambda: None,
) -> Record:
    """Have the hub's clients download a table, and record it.

    Without the hub, a commit that the clients have cached is recorded.

    Args:
        source: The table.
        cache_dir: The cache folder, which holds the record.
        fresh: Whether to fetch the newest commit even if the table has been fetched.
        counted: Called for every row.

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
    why = hub_cache.unreachable()
    if not why:
        with hub_cache.reasons(source):
            commit = hub_cache.download(source, force=bool(damage))
            return _record(source, commit, cache_dir, counted)
    missing = f"{damage}needs the dataset {source.dataset} from {hub_cache.HUB}, which {why}"
    for commit in [] if fresh or damage else hub_cache.cached_commits(source):
        try:
            with hub_cache.reasons(source):
                return _record(source, commit, cache_dir, counted)
        except NotFetched as error:
            missing = f"{error} (commit {commit[:12]} in its cache; the hub {why})"
    raise NotFetched(missing)


def _record(source: Source, commit: str, cache_dir: Path, counted: Callable[[], object]) -> Record:
    content = records.lines(source, hub_cache.read(source, commit))
    record = records.measure(content, lambda line: counted(), revision=commit, cached=True)
    records.write(source, record, cache_dir)
    return record
