"""The rows of a task: checked, generated once, and kept as JSONL with a content hash."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.benchmark import IMAGE, VIDEO, Doc
from kvbench.data.media import is_medium
from kvbench.errors import UserError, quoted
from kvbench.files import file_digests, replacing

SENTINEL = "<|kvb_split|>"
"""Separates context and question in the `doc_to_text` of a YAML."""

_SHOT = ("user", "assistant", "end")
_SHOT_FIELDS = "the texts user, assistant and end"


def digest(value: object) -> str:
    """16 hex digits of any JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_rows(version: str, rows: Sequence[Any]) -> str:
    """`digest` of `[version, rows]`, without a text of them all."""
    hashed = hashlib.sha256()
    between = f"[{json.dumps(version, ensure_ascii=False)}, ["
    for row in rows:
        hashed.update(f"{between}{json.dumps(row, sort_keys=True, ensure_ascii=False)}".encode())
        between = ", "
    hashed.update(b"]]" if rows else f"{between}]]".encode())
    return hashed.hexdigest()[:16]


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a JSONL file, line by line.

    Yields:
        Line number (from 1) and value of every line that is not blank.

    Raises:
        UserError: The file cannot be read, or a line is not valid JSON; the message names the line.
    """
    try:
        # utf-8-sig drops a byte order mark. Only line feeds end a line of JSONL: str.splitlines
        # would also split at a separator such as U+2028 inside a string.
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parsed(line.removesuffix("\n"), f"{path}:{number}")
    except UserError:  # it is a ValueError as well
        raise
    except (OSError, ValueError) as error:
        no_text = isinstance(error, UnicodeDecodeError)
        reason = getattr(error, "strerror", None) or ("it is not UTF-8 text" if no_text else error)
        raise UserError(f"cannot read {path}: {reason}") from None


def _parsed(line: str, where: str) -> Any:
    try:
        value = json.loads(line, object_pairs_hook=_unique)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg}") from None
    except ValueError:
        raise UserError(f"{where}: a number has more digits than kvbench reads") from None
    except RecursionError:
        raise UserError(f"{where}: the JSON is nested too deeply") from None
    if "\\u" in line:  # only an escape can spell half a character; the file itself is UTF-8
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(f"{where}: {half} is a lone surrogate, not a character") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that has a key twice: Python would silently keep the last value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"the key {quoted(twice)} is given twice")
    return value


def complete(doc: Mapping[str, Any], where: str) -> Doc:
    """Check a row and fill in its optional fields.

    Args:
        doc: A row as `Benchmark.docs` describes it.
        where: Name of the row in messages.

    Raises:
        UserError: A field is missing, has the wrong type or contains the sentinel.
    """
    for name, kind in (("context", str), ("question", str), ("outputs", list)):
        if not isinstance(doc.get(name), kind):
            raise UserError(f"{where}: {name!r} must be a {kind.__name__}")
    if not isinstance(doc.get("given", ""), str):
        raise UserError(f"{where}: 'given' must be a str")
    if not _are_shots(doc.get("shots", [])):
        raise UserError(f"{where}: 'shots' must be a list of objects with {_SHOT_FIELDS}")
    full: Doc = {"gen_prefix": "", "extra": {}, **doc}
    _check_media(full, where)
    if not full["outputs"] or not all(isinstance(o, str) for o in full["outputs"]):
        raise UserError(f"{where}: 'outputs' must be a list of at least one string")
    if any(SENTINEL in text for text in _strings(full)):
        raise UserError(f"{where}: the data must not contain {SENTINEL}, which kvbench uses itself")
    return full


def has_media(row: Mapping[str, Any]) -> bool:
    """Whether a row has images or videos, in one of its turns if it is a dialogue."""
    return any(part.get("media") for part in row.get("turns", [row]))


def _check_media(doc: Mapping[str, Any], where: str) -> None:
    media = doc.get("media", [])
    if not isinstance(media, list) or not all(map(is_medium, media)):
        raise UserError(f"{where}: 'media' must be a list of images and videos")
    if (found := doc["context"].count(IMAGE) + doc["context"].count(VIDEO)) != len(media):
        raise UserError(
            f"{where}: {len(media)} media need as many markers in 'context', not {found}"
        )
    if IMAGE in doc["question"] or VIDEO in doc["question"]:
        raise UserError(f"{where}: images and videos belong in 'context', not in 'question'")


def _are_shots(shots: object) -> bool:
    return isinstance(shots, list) and all(
        isinstance(shot, Mapping)
        and set(shot) == set(_SHOT)
        and all(isinstance(text, str) for text in shot.values())
        for shot in shots
    )


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name != "media":  # no text: megabytes of base64
                yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def cached(path: Path, samples: int, make: Callable[[int], list[Doc]], code: str = "") -> list[Doc]:
    """Return the first `samples` rows, from the file if it has them, otherwise generated and saved.

    The file is used only if its first line has the digest of its name, the generator's code and all
    of its rows, and its first row equals a newly generated one. So a changed row, and rows of an
    older generator, are never used.

    Args:
        path: The file; its name identifies everything that the rows depend on, except the
            generator itself.
        samples: Number of rows.
        make: Generates the first n rows; more rows begin with the same ones.
        code: Digest of the generator's code.
    """
    kept = _load(path, code)
    first = make(1)
    fresh = json.loads(json.dumps(first))
    if kept[:1] == fresh and len(kept) >= samples:
        return kept[:samples]
    rows: list[Doc] = json.loads(json.dumps(make(samples)))
    if len(rows) > len(kept) or kept[:1] != fresh:
        _save(path, rows, code)
    return rows


@functools.cache
def code_digest(module: str) -> str:
    """Digest of the files of the package that a module is in; "" if it has none."""
    top = sys.modules.get(module.partition(".")[0])
    file = Path(getattr(top, "__file__", None) or "")
    if not file.is_file():
        return ""
    files = [file] if file.name != "__init__.py" else sorted(file.parent.rglob("*"))
    files = [one for one in files if one.is_file() and one.suffix != ".pyc"]
    try:
        return digest(dict(zip(map(str, files), file_digests(files), strict=True)))
    except OSError:
        return ""


def _digest_of_rows(path: Path, code: str, body: str) -> str:
    return digest([path.name, code, body])


def _load(path: Path, code: str) -> list[Doc]:
    """Read rows that `_save` wrote; an empty list if it is missing, damaged or of old code."""
    try:
        head, _, body = path.read_text(encoding="utf-8").partition("\n")
        if json.loads(head)["rows"] != _digest_of_rows(path, code, body):
            return []
        return [json.loads(line) for line in body.splitlines()]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _save(path: Path, rows: list[Doc], code: str) -> None:
    """Write rows below their digest, all or nothing; do without the file if that fails."""
    body = "".join(json.dumps(row) + "\n" for row in rows)
    head = json.dumps({"rows": _digest_of_rows(path, code, body)})
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(f"{head}\n{body}", encoding="utf-8")
