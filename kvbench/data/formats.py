"""Rows of raw files, read one at a time: JSONL, JSON, CSV, TSV and parquet, compressed or not.

The images of an archive are rows as well, one for each file.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet

from kvbench.data.records import Row
from kvbench.errors import UserError

KINDS = ("jsonl", "json", "csv", "tsv", "parquet")
IMAGES = ("jpg", "jpeg", "png", "webp")

_NEXT = re.compile(r"\s*([,\]])\s*")
"""What follows an object of a JSON list."""


def split_member(name: str) -> tuple[str, str]:
    """Split `data.zip:data/x.jsonl` into archive and member; the member of a plain file is ""."""
    file, mark, member = name.partition(".zip:")
    return (f"{file}.zip", member) if mark else (name, "")


def file_rows(path: Path, member: str = "") -> Iterator[Row]:
    """Read the rows of a file.

    Args:
        path: The file. The extension gives the format.
        member: Name of the file inside the archive `path`, or "". A pattern such as `pics/*.jpg`
            gives a row `{"path": name, "bytes": content}` for each image, in order of name.

    Raises:
        UserError: The format is unknown, or the content does not match it.
    """
    name = member or path.name
    kind = name.removesuffix(".gz").rpartition(".")[2].lower()
    if "*" in member and kind not in KINDS:
        yield from _images(path, member)
        return
    if kind not in KINDS:
        raise UserError(f"cannot read {name}: use {', '.join(KINDS)}, also as .gz or in a .zip")
    try:
        file: Any
        with (
            zipfile.ZipFile(path).open(member) if member else path.open("rb") as raw,
            gzip.open(raw) if name.endswith(".gz") else contextlib.nullcontext(raw) as file,
        ):
            if kind == "parquet":
                for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=64):
                    yield from batch.to_pylist()
                return
            # A byte order mark is not part of the data.
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
            if kind == "jsonl":
                yield from (json.loads(line) for line in text if line.strip())
            elif kind == "json":
                yield from json_rows(text)
            else:
                csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field can be a whole book
                yield from csv.DictReader(text, delimiter="\t" if kind == "tsv" else ",")
    except KeyError:
        raise UserError(f"{path.name} does not contain {member}") from None
    except RecursionError:
        raise UserError(f"cannot read {name} as {kind}: it is nested too deeply") from None
    except (ValueError, EOFError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, csv.Error) as e:
        raise UserError(f"cannot read {name} as {kind}: {e}") from None


def _images(path: Path, pattern: str) -> Iterator[Row]:
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if fnmatch(name, pattern) and name.rpartition(".")[2].lower() in IMAGES:
                    yield {"path": name, "bytes": archive.read(name)}
    except (zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"cannot read {path.name} as zip: {error}") from None


def json_rows(file: IO[str], chunk: int = 1 << 20) -> Iterator[Row]:
    """Read the objects of a JSON list without holding the whole list, or a single object.

    Args:
        file: One JSON value.
        chunk: The least number of characters to read at once.

    Raises:
        ValueError: The content is not JSON, or neither an object nor a list of objects.
    """
    while (start := file.read(1)).isspace():
        pass
    if start == "{":
        yield json.loads(start + file.read())
        return
    if start != "[":
        raise ValueError("it is neither a list nor an object")
    text, at, mark = "", 0, None
    while mark is None or mark[1] == ",":
        try:
            row, stop = json.JSONDecoder().raw_decode(text, at)
            following = _NEXT.match(text, stop)
        except json.JSONDecodeError:
            following = None
        if following is None:  # most likely the rest of the object has not been read yet
            if mark is None and text.startswith("]"):
                at = 1
                break
            more = file.read(max(chunk, len(text) - at))
            if not more:
                raise ValueError("its list is invalid or incomplete")
            text, at = (text[at:] + more).lstrip(), 0
            continue
        if not isinstance(row, dict):
            raise ValueError(f"its list contains a {type(row).__name__}, not only objects")
        yield row
        mark, at = following, following.end()
    if (text[at:] + file.read()).strip():
        raise ValueError("text follows its list")
