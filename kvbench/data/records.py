"""Records of fetched tables: the commit, the number of rows and the hash of their content.

A record is the first line of `hub/<table>.jsonl` in the cache folder. Fetched rows stay in the caches of
`huggingface_hub` and `datasets`. Rows stored by `keep`, or by earlier versions of kvbench, follow the record in the
same file.
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
    """Error if a table is in no cache and the hub does not provide it. The message says why."""


class Damaged(UserError):
    """Error if the rows of a table do not match their recorded hash."""


@dataclass(frozen=True)
class Record:
    """Summary of a table, known without reading its rows.

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
    """Return the file of a table's record."""
    source_label = f"{source.dataset.replace('/', '--')}-{source.table.replace(' ', '-')}"
    safe_label = "".join(character if character.isalnum() or character in "-_." else "_" for character in source_label)[
        :120
    ]
    identity = json.dumps(asdict(source), sort_keys=True).encode()
    return cache_dir / "hub" / f"{safe_label}-{hashlib.sha256(identity).hexdigest()[:8]}.jsonl"


def head(source: Source, cache_dir: Path) -> Record | None:
    """Read the record of a table; None if there is no valid one."""
    record_path = path(source, cache_dir)
    try:
        with record_path.open("rb") as stored_file:
            header = json.loads(stored_file.readline())
            content_bytes = record_path.stat().st_size - stored_file.tell()
        record_fields = {
            record_field.name: header[record_field.name]
            for record_field in fields(Record)
            if record_field.name in header
        }
        return Record(**{"bytes": content_bytes, **record_fields})
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def write(source: Source, record: Record, cache_dir: Path, encoded_rows: Iterable[bytes] = ()) -> Path:
    """Write the record of a table and, unless they are cached, the lines of its rows.

    Raises:
        UserError: It cannot be written; an earlier record is unchanged.
    """
    record_path = path(source, cache_dir)
    header = json.dumps({**asdict(record), "of": source.label}).encode() + b"\n"
    try:
        record_path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(record_path) as partial_file:
            partial_file.write_bytes(header + b"".join(encoded_rows))
    except (OSError, UserError) as error:
        hint = "free some space, or set KVBENCH_CACHE to another folder"
        raise UserError(f"{error}; {hint}") from None
    return record_path


def keep(source: Source, rows: Iterable[Row], cache_dir: Path, *, revision: str = "") -> Path:
    """Store the rows of a table, such as test data, so that it is not fetched.

    Args:
        rows: Its raw rows; only the columns of the source are kept.
        revision: Commit of the hub that the rows are from.

    Returns:
        The file that holds them.

    Raises:
        UserError: The file cannot be written, or the rows lack a column.
    """
    encoded_lines: list[bytes] = []
    record = measure(lines(source, rows), encoded_lines.append, revision=revision)
    return write(source, record, cache_dir, encoded_lines)


def kept_lines(source: Source, cache_dir: Path) -> Iterator[bytes]:
    """Read the lines of the rows that follow a record."""
    with path(source, cache_dir).open("rb") as stored_lines:
        stored_lines.readline()
        yield from stored_lines


def lines(source: Source, rows: Iterable[Row]) -> Iterator[bytes]:
    """Convert the rows of a table to lines of JSON with the columns of the source.

    Raises:
        UserError: There are no rows, they lack a column, or a value is not a JSON value.
    """
    row_number = 0
    for row_number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{source.label}: row {row_number} is a {type(row).__name__}, not an object")
        missing_columns = [column for column in source.columns if column not in row]
        if row_number == 1 and missing_columns:
            column_names = ", ".join(map(str, row))
            raise UserError(f"{source.label} has no column {', '.join(missing_columns)}; it has {column_names}")
        selected = {column: row[column] for column in source.columns or row if column in row}
        yield json.dumps(selected, default=_plain).encode() + b"\n"
    if not row_number:
        raise UserError(f"{source.label} has no rows")


def _plain(value: object) -> str:
    """Encode values that JSON lacks: dates, and the bytes of images as base64."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise UserError(f"a column contains {type(value).__name__}, which is not a JSON value")


def measure(encoded_lines: Iterable[bytes], on_line: Callable[[bytes], object], **record_fields: Any) -> Record:
    """Count and hash lines, passing each of them to `on_line`; `record_fields` complete the record."""
    content_hash, row_count, byte_count = hashlib.sha256(), 0, 0
    for encoded_line in encoded_lines:
        content_hash.update(encoded_line)
        row_count, byte_count = row_count + 1, byte_count + len(encoded_line)
        on_line(encoded_line)
    return Record(content_hash.hexdigest(), row_count, byte_count, **record_fields)
