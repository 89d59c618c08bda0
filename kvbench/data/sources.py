"""The tables of the Hugging Face hub that tasks read, and our own copies of them.

A copy is a JSONL file in `hub/` below the cache folder. Its first line says what it is and holds
the SHA-256 of all that follows, so that a damaged copy is never read. It appears at once or not at
all, and is written and read row by row.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import IO, Any

from kvbench.benchmark import Source
from kvbench.errors import NeedsHub, UserError

Row = dict[str, Any]

_ROOM = 1024
"""Bytes of a copy's first line: it is written last, when the hash is known."""


class NotFetched(NeedsHub):
    """There is no copy of a table, and the hub does not give it; the message says why."""


class Damaged(UserError):
    """A copy whose content does not agree with its hash."""


@dataclass(frozen=True)
class Copy:
    """What the first line of a copy says, without a look at the rest.

    Attributes:
        path: The file.
        rows: How many rows it holds.
        revision: Commit of the hub that was fetched; "" where it was not fetched.
        sha256: Of all bytes after the first line.
        bytes: Size of the file.
    """

    path: Path
    rows: int
    revision: str
    sha256: str
    bytes: int


def path(source: Source, cache_dir: Path) -> Path:
    """Where our copy of a table lies."""
    words = f"{source.dataset.replace('/', '--')}-{source.table.replace(' ', '-')}"
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in words)[:120]
    asked = json.dumps(asdict(source), sort_keys=True)
    return cache_dir / "hub" / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.jsonl"


def rows(source: Source, cache_dir: Path) -> list[Row]:
    """The raw rows of a table, from our copy, or fetched from the hub first.

    Raises:
        NotFetched: There is neither a copy nor a hub that gives it.
        UserError: The hub has it but it cannot be kept, for want of room or a field.
    """
    try:
        return load(source, cache_dir)
    except (FileNotFoundError, Damaged) as broken:
        from kvbench.data.fetching import fetch

        try:
            fetch(source, cache_dir)
        except NotFetched as missing:
            if isinstance(broken, Damaged):
                raise NotFetched(f"{broken}, and it {missing}") from missing
            raise
        return load(source, cache_dir)


def load(source: Source, cache_dir: Path) -> list[Row]:
    """The rows of our copy.

    Raises:
        FileNotFoundError: There is none.
        Damaged: Its content does not agree with its hash.
        UserError: It cannot be read.
    """
    return list(_read(path(source, cache_dir)))


def keep(source: Source, rows: Iterable[Row], cache_dir: Path, *, revision: str = "") -> Path:
    """Write our copy of a table, of the source's columns; whole, or not at all.

    Args:
        source: The table.
        rows: Its raw rows.
        cache_dir: The copy goes to `hub/` below it.
        revision: Commit of the hub that they are from.

    Raises:
        UserError: It cannot be written, or the rows lack a field.
    """
    file = path(source, cache_dir)
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        out = part.open("wb")
    try:
        _write(out, file.parent, source, rows, revision)
        with writing(file.parent):
            out.close()
            os.replace(part, file)
    except BaseException:
        for clear in (out.close, part.unlink):  # closing writes what is left, and may fail again
            with contextlib.suppress(OSError):
                clear()
        raise
    return file


def head(source: Source, cache_dir: Path) -> Copy | None:
    """What there is of a table; None where there is no copy or its first line is damaged."""
    file = path(source, cache_dir)
    try:
        with file.open("rb") as lines:
            first = json.loads(lines.readline())
        return Copy(
            path=file,
            rows=int(first["rows"]),
            revision=str(first["revision"]),
            sha256=str(first["sha256"]),
            bytes=file.stat().st_size,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(source: Source, cache_dir: Path) -> Copy:
    """Hash a copy again.

    Raises:
        FileNotFoundError: There is none.
        Damaged: Its content does not agree with its hash.
        UserError: It cannot be read.
    """
    for _ in _read(path(source, cache_dir), parse=False):
        pass
    found = head(source, cache_dir)
    assert found is not None  # it has just been read
    return found


@contextlib.contextmanager
def hinting(leaf: str) -> Iterator[None]:
    """Have what cannot be had say which command gets a leaf's tables."""
    try:
        yield
    except NotFetched as missing:
        raise NotFetched(f"{missing}; `kvbench data fetch {leaf}` gets it") from missing


@contextlib.contextmanager
def locked(source: Source, cache_dir: Path) -> Iterator[None]:
    """Keep other processes from fetching the same table, and remove what a killed one left.

    Raises:
        UserError: The folder cannot be written to.
    """
    file = path(source, cache_dir)
    with writing(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = (file.parent / f".{file.stem}.lock").open("w")
    with lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # let go by the system when the process ends, killed or not
        for left in file.parent.glob(f"{file.stem}.*.part"):
            with contextlib.suppress(OSError):
                left.unlink()
        shutil.rmtree(scratch(source, cache_dir), ignore_errors=True)
        yield


def scratch(source: Source, cache_dir: Path) -> Path:
    """The folder for what is needed while a table is fetched."""
    return path(source, cache_dir).with_suffix(".arrow")


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what keeps a file from being written into one line.

    Raises:
        UserError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write into {folder}: {error.strerror or error}; make room, or set "
            "KVBENCH_CACHE to another folder"
        ) from None


# --- the file -------------------------------------------------------------------------------------


def _write(
    out: IO[bytes], folder: Path, source: Source, rows: Iterable[Row], revision: str
) -> None:
    digest = hashlib.sha256()
    count = 0
    with writing(folder):
        out.write(b" " * (_ROOM - 1) + b"\n")
    for row in rows:
        if not count:
            _check(source, row)
        if source.columns:
            row = {name: row[name] for name in source.columns if name in row}
        line = (json.dumps(row, default=_plain) + "\n").encode()
        digest.update(line)
        count += 1
        with writing(folder):
            out.write(line)
    if not count:
        raise UserError(f"{source.label} has no rows")
    first = {"sha256": digest.hexdigest(), "rows": count, "revision": revision}
    line = json.dumps({**first, "of": source.label}).encode()
    if len(line) >= _ROOM:  # what it is of is for readers, and not read back
        line = json.dumps(first).encode()
    with writing(folder):
        out.seek(0)
        out.write(line)
        out.flush()
        os.fsync(out.fileno())


def _check(source: Source, row: Any) -> None:
    if not isinstance(row, dict):
        raise UserError(f"{source.label}: a row is a {type(row).__name__}, not an object of fields")
    missing = [name for name in source.columns if name not in row]
    if missing:
        raise UserError(
            f"{source.label} has no field {', '.join(missing)}; it has {', '.join(map(str, row))}"
        )


def _plain(value: object) -> str:
    """Dates are the one thing that tables of the hub hold and JSON does not."""
    if isinstance(value, date):
        return value.isoformat()
    raise UserError(f"a field holds a {type(value).__name__}, which is no text, number or list")


def _read(file: Path, parse: bool = True) -> Iterator[Row]:
    """The rows of a copy (empty ones unless they are parsed); at the end the hash is compared."""
    damaged = Damaged(f"{file} is damaged: its content does not agree with its hash")
    digest = hashlib.sha256()
    count = 0
    try:
        with file.open("rb") as lines:
            first = json.loads(lines.readline())
            for line in lines:
                digest.update(line)
                count += 1
                yield json.loads(line) if parse else {}
        if (first["sha256"], first["rows"]) != (digest.hexdigest(), count):
            raise damaged
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise damaged from None
