"""Records of fetched tables: the commit, the number of rows and the hash of their content.

A record is the first line of `hub/<table>.jsonl` in the cache folder. Fetched rows stay in the
caches of `huggingface_hub` and `datasets`. Rows that `keep` puts in place follow the record in the
same file, and so do the rows that earlier versions of kvbench copied there.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from kvbench.benchmark import Source
from kvbench.errors import NeedsHub, UserError
from kvbench.files import replacing

Row = dict[str, Any]


class NotFetched(NeedsHub):
    """A table is in no cache, and the hub does not provide it. The message says why."""


class Damaged(UserError):
    """The rows of a table do not match their recorded hash."""


@dataclass(frozen=True)
class Record:
    """What is known about a table without reading its rows.

    Attributes:
        sha256: SHA-256 of the rows as lines of JSON; see `lines`.
        rows: Number of rows.
        bytes: Size of these lines.
        revision: Commit of the hub; "" if unknown.
        cached: Whether the rows are in the hub's caches; otherwise they follow in the file.
    """

    sha256: str
    rows: int
    bytes: int
    revision: str = ""
    cached: bool = False


def path(source: Source, cache_dir: Path) -> Path:
    """The file of a table's record."""
    words = f"{source.dataset.replace('/', '--')}-{source.table.replace(' ', '-')}"
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in words)[:120]
    identity = json.dumps(asdict(source), sort_keys=True).encode()
    return cache_dir / "hub" / f"{name}-{hashlib.sha256(identity).hexdigest()[:8]}.jsonl"


def head(source: Source, cache_dir: Path) -> Record | None:
    """Read the record of a table; None if there is no valid one."""
    file = path(source, cache_dir)
    try:
        with file.open("rb") as content:
            first = json.loads(content.readline())
            size = file.stat().st_size - content.tell()
        known = {f.name: first[f.name] for f in fields(Record) if f.name in first}
        return Record(**{"bytes": size, **known})
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def write(source: Source, record: Record, cache_dir: Path, rows: Iterable[bytes] = ()) -> Path:
    """Write the record of a table and, unless they are cached, the lines of its rows.

    Raises:
        UserError: It cannot be written; an earlier record is unchanged.
    """
    file = path(source, cache_dir)
    first = json.dumps({**asdict(record), "of": source.label}).encode() + b"\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as part:
            part.write_bytes(first + b"".join(rows))
    except (OSError, UserError) as error:
        hint = "free some space, or set KVBENCH_CACHE to another folder"
        raise UserError(f"{error}; {hint}") from None
    return file


def keep(source: Source, rows: Iterable[Row], cache_dir: Path, *, revision: str = "") -> Path:
    """Put the rows of a table in place, such as those of a test, so that it is not fetched.

    Args:
        source: The table.
        rows: Its raw rows; only the columns of the source are kept.
        cache_dir: The cache folder.
        revision: Commit of the hub that the rows are from.

    Returns:
        The file that holds them.

    Raises:
        UserError: The file cannot be written, or the rows lack a column.
    """
    content: list[bytes] = []
    record = measure(lines(source, rows), content.append, revision=revision)
    return write(source, record, cache_dir, content)


def kept_lines(source: Source, cache_dir: Path) -> Iterator[bytes]:
    """Read the lines of the rows that follow a record."""
    with path(source, cache_dir).open("rb") as content:
        content.readline()
        yield from content


def lines(source: Source, rows: Iterable[Row]) -> Iterator[bytes]:
    """Turn the rows of a table into lines of JSON that hold the columns of the source.

    Raises:
        UserError: There are no rows, they lack a column, or a value is not a JSON value.
    """
    count = 0
    for count, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{source.label}: row {count} is a {type(row).__name__}, not an object")
        missing = [name for name in source.columns if name not in row]
        if count == 1 and missing:
            names = ", ".join(map(str, row))
            raise UserError(f"{source.label} has no column {', '.join(missing)}; it has {names}")
        kept = {name: row[name] for name in source.columns or row if name in row}
        yield json.dumps(kept, default=_plain).encode() + b"\n"
    if not count:
        raise UserError(f"{source.label} has no rows")


def _plain(value: object) -> str:
    """Write what JSON lacks and a task can need: dates, and the bytes of images, in base64."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise UserError(f"a column contains {type(value).__name__}, which is not a JSON value")


def measure(lines: Iterable[bytes], each: Callable[[bytes], object], **known: Any) -> Record:
    """Count and hash lines, and pass each of them on; `known` completes the record."""
    digest, rows, size = hashlib.sha256(), 0, 0
    for line in lines:
        digest.update(line)
        rows, size = rows + 1, size + len(line)
        each(line)
    return Record(digest.hexdigest(), rows, size, **known)
