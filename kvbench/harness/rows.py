"""A task's rows: checked, generated once, and kept as content-hashed JSONL."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.benchmark import Doc
from kvbench.errors import UserError

SENTINEL = "<|kvb_split|>"
"""Parts context from question in a YAML's `doc_to_text`."""


def digest(value: object) -> str:
    """16 hex digits of any JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(path: Path) -> list[tuple[int, Any]]:
    """Read a JSONL file.

    Returns:
        Line number (from 1) and value of every line that is not blank.

    Raises:
        UserError: The file cannot be read, or a line is not JSON or not text; it names the line.
    """
    try:
        # A byte order mark is no part of the data. Only line feeds end a line of JSONL:
        # str.splitlines would also cut at a separator such as U+2028 within a string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append((number, _parsed(line, f"{path}:{number}")))
    return rows


def _parsed(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"{where}: not JSON: {reason}") from None
    if "\\u" in line:  # only an escape can spell half a character; the file itself is UTF-8
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(f"{where}: {half} alone is no character (a lone surrogate)") from None
    return value


def complete(doc: Mapping[str, Any], where: str) -> Doc:
    """Check a row and fill in what it may leave out.

    Args:
        doc: A row as `Benchmark.docs` describes it.
        where: Names the row in messages.

    Raises:
        UserError: A field is missing or of the wrong type, or holds the sentinel.
    """
    for name, kind in (("context", str), ("question", str), ("outputs", list)):
        if not isinstance(doc.get(name), kind):
            raise UserError(f"{where}: {name!r} must be a {kind.__name__}")
    if not isinstance(doc.get("given", ""), str):
        raise UserError(f"{where}: 'given' must be a str")
    full: Doc = {"gen_prefix": "", "extra": {}, **doc}
    if not full["outputs"] or not all(isinstance(o, str) for o in full["outputs"]):
        raise UserError(f"{where}: 'outputs' must be a list of at least one string")
    if any(SENTINEL in text for text in _strings(full)):
        raise UserError(f"{where}: the data must not contain {SENTINEL}, which kvbench itself uses")
    return full


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def cached(path: Path, samples: int, make: Callable[[int], list[Doc]]) -> list[Doc]:
    """Give the first `samples` rows, from the file if it holds them, else generated and kept.

    The file is used only if its content agrees with the hash in its first line, and its first row
    with a row that is generated anew: what a changed generator left behind is never used.

    Args:
        path: The file; its name says all that the rows depend on but the generator itself.
        samples: How many rows.
        make: Generates the first n rows; a larger n begins with the rows of a smaller one.
    """
    kept = load_hashed(path)
    first = make(1)
    fresh = json.loads(json.dumps(first))
    if kept[:1] == fresh and len(kept) >= samples:
        return kept[:samples]
    rows: list[Doc] = json.loads(json.dumps(make(samples)))
    if len(rows) > len(kept) or kept[:1] != fresh:
        save_hashed(path, rows)
    return rows


def load_hashed(path: Path) -> list[Doc]:
    """Read rows that `save_hashed` wrote; none where the file is missing or damaged."""
    try:
        head, _, body = path.read_text(encoding="utf-8").partition("\n")
        if json.loads(head)["sha256"] != hashlib.sha256(body.encode()).hexdigest():
            return []
        return [json.loads(line) for line in body.splitlines()]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def save_hashed(path: Path, rows: list[Doc]) -> None:
    """Write rows below their hash, at once or not at all; where that fails, do without the file."""
    body = "".join(json.dumps(row) + "\n" for row in rows)
    head = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest()})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{head}\n{body}")
        os.replace(name, path)
