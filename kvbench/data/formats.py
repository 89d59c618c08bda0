"""Rows of raw files, one at a time: JSONL, JSON, CSV and parquet, packed or not."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from kvbench.errors import UserError

Row = dict[str, Any]

KINDS = ("jsonl", "json", "csv", "tsv", "parquet")


def split_member(name: str) -> tuple[str, str]:
    """The file of a repository and the archive's member, or "": `data.zip:data/x.jsonl`."""
    file, mark, member = name.partition(".zip:")
    return (f"{file}.zip", member) if mark else (name, "")


def file_rows(path: Path, member: str = "") -> Iterator[Row]:
    """The rows of a file.

    Args:
        path: The file; what it is, its name says.
        member: Which of an archive's files.

    Raises:
        UserError: Its kind is not known, or it does not hold what its name says.
    """
    name = member or path.name
    kind = name.removesuffix(".gz").rpartition(".")[2].lower()
    if kind not in KINDS:
        raise UserError(f"{name} is none of {', '.join(KINDS)} (.gz, or in a .zip:)")
    try:
        with _open(path, member) as file:
            if kind == "parquet":
                yield from _parquet(file)
                return
            # A byte order mark is no part of the data.
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
            if kind == "jsonl":
                yield from (json.loads(line) for line in text if line.strip())
            elif kind == "json":
                yield from json_rows(text)
            else:
                csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field may be a whole book
                yield from csv.DictReader(text, delimiter="\t" if kind == "tsv" else ",")
    except (ValueError, EOFError, zipfile.BadZipFile, gzip.BadGzipFile, csv.Error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name} is no {kind} that can be read: {error}") from None


@contextlib.contextmanager
def _open(path: Path, member: str) -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as stack:
        file: Any
        if member:
            archive = stack.enter_context(zipfile.ZipFile(path))
            if member not in archive.namelist():
                have = ", ".join(archive.namelist()[:8])
                raise UserError(f"{path.name} has no {member}; it has {have}")
            file = stack.enter_context(archive.open(member))
        else:
            file = stack.enter_context(path.open("rb"))
        if (member or path.name).endswith(".gz"):
            file = stack.enter_context(gzip.open(file))
        yield file


def _parquet(file: IO[bytes]) -> Iterator[Row]:
    import pyarrow.parquet

    if not file.seekable():
        file = io.BytesIO(file.read())
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=64):
        yield from batch.to_pylist()


def json_rows(file: IO[str], chunk: int = 1 << 20) -> Iterator[Row]:
    """The objects of a JSON list, without holding the whole list; or the one object there is.

    Args:
        file: Holds one JSON value.
        chunk: Characters that are read at once, at least.

    Raises:
        ValueError: It is no JSON, or neither an object nor a list of objects.
    """
    decoder = json.JSONDecoder()
    text, at = file.read(chunk).lstrip(), 0
    if text.startswith("{"):
        yield json.loads(text + file.read())
        return
    if not text.startswith("["):
        raise ValueError("it holds neither a list nor an object")
    at, before = 1, "["
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at < len(text):
            mark = text[at]
            if mark == "]" and before != ",":
                if (text[at + 1 :] + file.read()).strip():
                    raise ValueError("something follows its list")
                return
            if mark == "," and before == "}":
                at, before = at + 1, ","
                continue
            if mark != "{" or before == "}":
                raise ValueError(f"{mark!r} stands where an object should")
            try:
                row, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError:
                pass  # most likely its end has not been read yet
            else:
                before = "}"
                yield row
                continue
        more = file.read(max(chunk, len(text) - at))
        if not more:
            raise ValueError("it ends in the middle of its list")
        text, at = text[at:] + more, 0
