"""Readers of raw files, one row at a time: JSONL, JSON, CSV, TSV and parquet, compressed or not.

The images of an archive are rows too, one per file.
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
"""Delimiters after an object of a JSON list."""


def split_member(file_name: str) -> tuple[str, str]:
    """Split `data.zip:data/x.jsonl` into archive and member; the member of a plain file is ""."""
    archive_stem, separator, member = file_name.partition(".zip:")
    return (f"{archive_stem}.zip", member) if separator else (file_name, "")


def file_rows(path: Path, member: str = "") -> Iterator[Row]:
    """Read the rows of a file.

    Args:
        path: The file. Its extension determines the format.
        member: Name of the file inside the archive `path`, or "". A pattern such as `pics/*.jpg` gives a row
            `{"path": name, "bytes": content}` for each image, sorted by name.

    Raises:
        UserError: The format is unknown, or the content does not match it.
    """
    file_name = member or path.name
    file_format = file_name.removesuffix(".gz").rpartition(".")[2].lower()
    if "*" in member and file_format not in KINDS:
        yield from _images(path, member)
        return
    if file_format not in KINDS:
        raise UserError(f"cannot read {file_name}: use {', '.join(KINDS)}, also as .gz or in a .zip")
    try:
        opened_file: Any
        with (
            zipfile.ZipFile(path).open(member) if member else path.open("rb") as raw_file,
            gzip.open(raw_file) if file_name.endswith(".gz") else contextlib.nullcontext(raw_file) as opened_file,
        ):
            if file_format == "parquet":
                for batch in pyarrow.parquet.ParquetFile(opened_file).iter_batches(batch_size=64):
                    yield from batch.to_pylist()
                return
            # A byte order mark is not part of the data.
            text_stream = io.TextIOWrapper(opened_file, encoding="utf-8-sig", newline="\n")
            if file_format == "jsonl":
                yield from (json.loads(line) for line in text_stream if line.strip())
            elif file_format == "json":
                yield from json_rows(text_stream)
            else:
                csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a field can be a whole book
                yield from csv.DictReader(text_stream, delimiter="\t" if file_format == "tsv" else ",")
    except KeyError:
        raise UserError(f"{path.name} does not contain {member}") from None
    except RecursionError:
        raise UserError(f"cannot read {file_name} as {file_format}: it is nested too deeply") from None
    except (
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        gzip.BadGzipFile,
        zlib.error,
        csv.Error,
    ) as error:
        raise UserError(f"cannot read {file_name} as {file_format}: {error}") from None


def _images(path: Path, pattern: str) -> Iterator[Row]:
    try:
        with zipfile.ZipFile(path) as archive:
            for image_path in sorted(archive.namelist()):
                if fnmatch(image_path, pattern) and image_path.rpartition(".")[2].lower() in IMAGES:
                    yield {"path": image_path, "bytes": archive.read(image_path)}
    except (zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"cannot read {path.name} as zip: {error}") from None


def json_rows(stream: IO[str], chunk_size: int = 1 << 20) -> Iterator[Row]:
    """Read the objects of a JSON list without holding the whole list, or a single object.

    Args:
        stream: One JSON value.
        chunk_size: Minimum number of characters to read at once.

    Raises:
        ValueError: The content is not JSON, or neither an object nor a list of objects.
    """
    while (first_character := stream.read(1)).isspace():
        pass
    if first_character == "{":
        yield json.loads(first_character + stream.read())
        return
    if first_character != "[":
        raise ValueError("it is neither a list nor an object")
    buffer, position, delimiter = "", 0, None
    while delimiter is None or delimiter[1] == ",":
        try:
            parsed_row, end_position = json.JSONDecoder().raw_decode(buffer, position)
            next_delimiter = _NEXT.match(buffer, end_position)
        except json.JSONDecodeError:
            next_delimiter = None
        if next_delimiter is None:  # probably the rest of the object has not been read yet
            if delimiter is None and buffer.startswith("]"):
                position = 1
                break
            addition = stream.read(max(chunk_size, len(buffer) - position))
            if not addition:
                raise ValueError("its list is invalid or incomplete")
            buffer, position = (buffer[position:] + addition).lstrip(), 0
            continue
        if not isinstance(parsed_row, dict):
            raise ValueError(f"its list contains a {type(parsed_row).__name__}, not only objects")
        yield parsed_row
        delimiter, position = next_delimiter, next_delimiter.end()
    if (buffer[position:] + stream.read()).strip():
        raise ValueError("text follows its list")
