"""Rows of a task: checked, generated once, and kept as JSONL with a content hash."""

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
"""Separator of context and question in the `doc_to_text` of a YAML."""

_SHOT = ("user", "assistant", "end")
_SHOT_FIELDS = "the texts user, assistant and end"


def digest(value: object) -> str:
    """Return 16 hex digits over any JSON value."""
    serialised = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(serialised.encode()).hexdigest()[:16]


def digest_rows(version: str, rows: Sequence[Any]) -> str:
    """Return `digest` of `[version, rows]` without encoding all rows at once."""
    content_hash = hashlib.sha256()
    separator = f"[{json.dumps(version, ensure_ascii=False)}, ["
    for row in rows:
        content_hash.update(f"{separator}{json.dumps(row, sort_keys=True, ensure_ascii=False)}".encode())
        separator = ", "
    content_hash.update(b"]]" if rows else f"{separator}]]".encode())
    return content_hash.hexdigest()[:16]


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a JSONL file, line by line.

    Yields:
        Line number (from 1) and value of every line that is not blank.

    Raises:
        UserError: The file cannot be read, or a line is not valid JSON; the message names the line.
    """
    try:
        # utf-8-sig drops a byte order mark. Only line feeds end a line of JSONL: str.splitlines would also split at a
        # separator such as U+2028 inside a string.
        with path.open(encoding="utf-8-sig", newline="\n") as text_lines:
            for line_number, line in enumerate(text_lines, 1):
                if line.strip():
                    yield line_number, _parsed(line.removesuffix("\n"), f"{path}:{line_number}")
    except UserError:  # also a ValueError, so re-raise it before the next clause
        raise
    except (OSError, ValueError) as error:
        is_binary = isinstance(error, UnicodeDecodeError)
        reason = getattr(error, "strerror", None) or ("it is not UTF-8 text" if is_binary else error)
        raise UserError(f"cannot read {path}: {reason}") from None


def _parsed(line: str, location: str) -> Any:
    try:
        value = json.loads(line, object_pairs_hook=_unique)
    except UserError as error:
        raise UserError(f"{location}: {error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{location}: not JSON: {error.msg}") from None
    except ValueError:
        raise UserError(f"{location}: a number has more digits than kvbench reads") from None
    except RecursionError:
        raise UserError(f"{location}: the JSON is nested too deeply") from None
    if "\\u" in line:  # only an escape can encode a lone surrogate, because the file itself is UTF-8
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            surrogate = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(f"{location}: {surrogate} is a lone surrogate, not a character") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that has a key twice; Python would silently keep the last value."""
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated_key = next(key for key in keys if keys.count(key) > 1)
        raise UserError(f"the key {quoted(repeated_key)} is given twice")
    return parsed


def complete(document: Mapping[str, Any], location: str, *, has_references: bool = True) -> Doc:
    """Check a row and fill in its optional fields.

    Args:
        document: A row as `Benchmark.docs` describes it.
        location: Name of the row in messages.
        has_references: See `Benchmark.has_references`.

    Raises:
        UserError: A field is missing, has the wrong type or contains the sentinel.
    """
    for key, expected_type in (("context", str), ("question", str), ("outputs", list)):
        if not isinstance(document.get(key), expected_type):
            raise UserError(f"{location}: {key!r} must be a {expected_type.__name__}")
    if not isinstance(document.get("given", ""), str):
        raise UserError(f"{location}: 'given' must be a str")
    if not _are_shots(document.get("shots", [])):
        raise UserError(f"{location}: 'shots' must be a list of objects with {_SHOT_FIELDS}")
    completed: Doc = {"gen_prefix": "", "extra": {}, **document}
    _check_media(completed, location)
    if not has_references:
        if completed["outputs"]:
            raise UserError(f"{location}: 'outputs' must be empty, because the benchmark has no reference answers")
    elif not completed["outputs"] or not all(isinstance(output, str) for output in completed["outputs"]):
        raise UserError(f"{location}: 'outputs' must be a list of at least one string")
    if any(SENTINEL in content for content in _strings(completed)):
        raise UserError(f"{location}: the data must not contain {SENTINEL}, which kvbench uses itself")
    return completed


def has_media(row: Mapping[str, Any]) -> bool:
    """Return whether a row, or one of its turns if it is a dialogue, has images or videos."""
    return any(turn.get("media") for turn in row.get("turns", [row]))


def _check_media(document: Mapping[str, Any], location: str) -> None:
    media = document.get("media", [])
    if not isinstance(media, list) or not all(map(is_medium, media)):
        raise UserError(f"{location}: 'media' must be a list of images and videos")
    if (marker_count := document["context"].count(IMAGE) + document["context"].count(VIDEO)) != len(media):
        raise UserError(f"{location}: {len(media)} media need as many markers in 'context', not {marker_count}")
    if IMAGE in document["question"] or VIDEO in document["question"]:
        raise UserError(f"{location}: images and videos belong in 'context', not in 'question'")


def _are_shots(shots: object) -> bool:
    return isinstance(shots, list) and all(
        isinstance(shot, Mapping) and set(shot) == set(_SHOT) and all(isinstance(text, str) for text in shot.values())
        for shot in shots
    )


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "media":  # not text, but megabytes of base64
                yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def cached(cache_path: Path, samples: int, generate: Callable[[int], list[Doc]], code_hash: str = "") -> list[Doc]:
    """Return the first `samples` rows, from the file if it has them, otherwise generated and saved.

    The file is used only if its first line has the digest of its name, the generator's code and all of its rows, and
    its first row equals a newly generated one. Changed rows, and rows of an older generator, are thus never used.

    Args:
        cache_path: The file; its name identifies everything that the rows depend on, except the generator itself.
        samples: Number of rows.
        generate: Generates the first n rows; a larger n begins with the same rows.
        code_hash: Digest of the generator's code.
    """
    cached_rows = _load(cache_path, code_hash)
    first_rows = generate(1)
    plain_rows = json.loads(json.dumps(first_rows))
    if cached_rows[:1] == plain_rows and len(cached_rows) >= samples:
        return cached_rows[:samples]
    rows: list[Doc] = json.loads(json.dumps(generate(samples)))
    if len(rows) > len(cached_rows) or cached_rows[:1] != plain_rows:
        _save(cache_path, rows, code_hash)
    return rows


@functools.cache
def code_digest(module_name: str) -> str:
    """Return the digest of the files in a module's package; "" if it has none."""
    top_module = sys.modules.get(module_name.partition(".")[0])
    module_file = Path(getattr(top_module, "__file__", None) or "")
    if not module_file.is_file():
        return ""
    code_files = [module_file] if module_file.name != "__init__.py" else sorted(module_file.parent.rglob("*"))
    code_files = [code_file for code_file in code_files if code_file.is_file() and code_file.suffix != ".pyc"]
    try:
        return digest(dict(zip(map(str, code_files), file_digests(code_files), strict=True)))
    except OSError:
        return ""


def _digest_of_rows(path: Path, code_hash: str, encoded_rows: str) -> str:
    return digest([path.name, code_hash, encoded_rows])


def _load(path: Path, code_hash: str) -> list[Doc]:
    """Read rows that `_save` wrote; return [] if the file is missing, damaged or from old code."""
    try:
        header, _, encoded_rows = path.read_text(encoding="utf-8").partition("\n")
        if json.loads(header)["rows"] != _digest_of_rows(path, code_hash, encoded_rows):
            return []
        return [json.loads(line) for line in encoded_rows.splitlines()]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _save(path: Path, rows: list[Doc], code_hash: str) -> None:
    """Write rows after their digest, all or nothing; a failure is ignored."""
    encoded_rows = "".join(json.dumps(row) + "\n" for row in rows)
    header = json.dumps({"rows": _digest_of_rows(path, code_hash, encoded_rows)})
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial_file:
            partial_file.write_text(f"{header}\n{encoded_rows}", encoding="utf-8")
