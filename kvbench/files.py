"""Environment variables, cache folder, digests, atomic writes, and the journal."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from kvbench.errors import UserError

Value = TypeVar("Value")


def is_off(variable: str) -> bool:
    """Return whether an environment variable turns something off that is on by default."""
    return os.environ.get(variable, "").strip().lower() in ("0", "false", "no", "off")


def cache_dir() -> Path:
    """Return the folder for generated data: `$KVBENCH_CACHE`, or `kvbench` in the user's cache folder.

    Raises:
        UserError: The user has no home folder.
    """
    if os.environ.get("KVBENCH_CACHE"):
        return Path(os.environ["KVBENCH_CACHE"])
    try:
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise UserError("this user has no home folder; set KVBENCH_CACHE to a folder for generated data") from None
    return Path(cache_home) / "kvbench"


def cannot(verb: str, target_path: str | Path, error: OSError) -> UserError:
    """Return a one-line error for a file that cannot be read or written."""
    return UserError(f"cannot {verb} {target_path}: {error.strerror or error}")


def check_writable(path: Path) -> None:
    """Refuse a folder that cannot be created or written.

    Raises:
        UserError: The folder cannot be created or written.
    """
    try:
        nearest_folder = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    except OSError as error:  # such as a name that is too long
        raise cannot("write", path, error) from None
    if not nearest_folder.is_dir():
        raise UserError(f"cannot write {path}: {nearest_folder} is a file, not a folder")
    if not os.access(nearest_folder, os.W_OK):
        raise UserError(f"cannot write {path}: permission denied in {nearest_folder}")


def create_folder(folder: Path) -> None:
    """Create a folder and its parents unless they exist.

    Raises:
        UserError: It cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", folder, error) from None


# --- digests --------------------------------------------------------------------------------------


def digest_of(value: object) -> str:
    """Return a digest of a JSON value, 16 hex digits, independent of the order of keys."""
    json_text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(json_text.encode()).hexdigest()[:16]


State: TypeAlias = tuple[int, ...]
"""File metadata that changes whenever the content changes; see `state_of`."""

_SETTLED = 2 * 10**9
"""Nanoseconds after a change during which a second change might not alter the file's times."""


def state_of(file_path: Path) -> State:
    """Return size, modification time, change time, inode and device of a file.

    `cp -p` and `rsync -t` preserve size and modification time; only the kernel sets the change time.

    Raises:
        OSError: The file cannot be read.
    """
    file_status = file_path.stat()
    return (
        file_status.st_size,
        file_status.st_mtime_ns,
        file_status.st_ctime_ns,
        file_status.st_ino,
        file_status.st_dev,
    )


_LARGE = 1 << 20
"""Bytes from which reading a file takes longer than looking its digest up."""


def file_digests(file_paths: Iterable[Path]) -> list[str]:
    """Return the SHA-256 of each file; those of large files are cached by path and `state_of`.

    Raises:
        OSError: A file cannot be read.
    """
    known: _KnownDigests | None = None
    digests = []
    for file_path in file_paths:
        if file_path.stat().st_size < _LARGE:
            digests.append(sha256_of(file_path))
        else:
            known = known or _KnownDigests()
            digests.append(known.digest(file_path))
    if known is not None:
        known.store()
    return digests


def sha256_of(file_path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits.

    Raises:
        OSError: The file cannot be read.
    """
    with file_path.open("rb") as file_handle:
        return hashlib.file_digest(file_handle, "sha256").hexdigest()


class _KnownDigests:
    """State and digest of large files by path, as the cache holds them."""

    def __init__(self) -> None:
        self._cache_path = cache_dir() / "digests.json"
        try:
            content = json.loads(self._cache_path.read_text())
        except (OSError, ValueError):
            content = {}
        self._stored = content if isinstance(content, dict) else {}
        self._known = dict(self._stored)

    def digest(self, file_path: Path) -> str:
        """Return the digest of a file; it is read unless its state is known."""
        resolved_name, file_state = str(file_path.resolve()), list(state_of(file_path))
        known = self._known.pop(resolved_name, None)
        if not isinstance(known, list) or len(known) != 2 or known[0] != file_state:  # also entries of earlier versions
            known = [file_state, sha256_of(file_path)]
        if time.time_ns() - file_state[2] >= _SETTLED and list(state_of(file_path)) == file_state:
            self._known[resolved_name] = known
        return str(known[1])

    def store(self) -> None:
        """Write what has changed, without files that are gone."""
        if self._known != self._stored:
            store_json(self._cache_path, {name: known for name, known in self._known.items() if os.path.exists(name)})


def stored_json(cache_path: Path, compute: Callable[[], Any], decode: Callable[[Any], Value]) -> Value:
    """Return the decoded content of a cache file; computed, and written if possible, if it is absent or damaged."""
    try:
        return decode(json.loads(cache_path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        content = compute()
        store_json(cache_path, content)
        return decode(content)


def store_json(cache_path: Path, content: object) -> None:
    """Write a cache file if possible; a cache that cannot be written is slow, not wrong."""
    with contextlib.suppress(OSError, UserError):
        cache_path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cache_path) as partial_path:
            partial_path.write_text(json.dumps(content), encoding="utf-8")


# --- atomic writes --------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(target_path: Path) -> Iterator[Path]:
    """Yield a temporary path; it replaces `target_path` once its content is on disk.

    If `target_path` is a symbolic link, the file that it points to is replaced.

    Raises:
        UserError: The file cannot be written; `target_path` is unchanged.
    """
    if os.path.islink(target_path):
        target_path = Path(os.path.realpath(target_path))
    partial_path = _partial(target_path)
    try:
        yield partial_path
        _sync(partial_path)
        partial_path.replace(target_path)
        _sync(target_path.parent)
    except OSError as error:
        raise cannot("write", target_path, error) from None
    finally:
        with contextlib.suppress(OSError):  # for example, the name was too long to create
            partial_path.unlink()


def _partial(target_path: Path) -> Path:
    """Return a name of its own for what will replace a path: processes in containers can have the same number."""
    return target_path.with_name(f".{target_path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")


def unfinished(file_path: Path) -> list[Path]:
    """Return partial files that `replacing` left for `file_path`; their processes may still run."""
    return sorted(file_path.parent.glob(f".{glob.escape(file_path.name)}.*.part"))


def write_whole(target_path: Path, content: bytes) -> None:
    """Write a file atomically and create its parent folders.

    A device such as `/dev/stdout` or a named pipe is opened and written to instead.

    Raises:
        UserError: The file cannot be written; an existing one is unchanged.
    """
    try:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        if target_path.exists() and _is_stream(target_path):
            with open(os.open(target_path, os.O_WRONLY | os.O_APPEND), "wb") as stream:
                stream.write(content)
            return
    except OSError as error:
        raise cannot("write", target_path, error) from None
    with replacing(target_path) as partial_path:
        partial_path.write_bytes(content)


def _is_stream(file_path: Path) -> bool:
    """Return whether a path is a device, a pipe or an open file such as `/dev/stdout`."""
    return not stat.S_ISREG(file_path.stat().st_mode) or file_path.absolute().parts[1] in (
        "dev",
        "proc",
    )


def _sync(file_path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to disk."""
    descriptor = os.open(file_path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder; it becomes `folder` once all of its files are on disk.

    If another process creates `folder` in the meantime, that folder stays and this one is discarded.

    Raises:
        UserError: The folder cannot be written; `folder` does not exist.
    """
    partial_folder = _partial(folder)
    try:
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        yield partial_folder
        for file_path in partial_folder.rglob("*"):
            _sync(file_path)
        try:
            partial_folder.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        _sync(folder.parent)
    except OSError as error:
        raise cannot("write", folder, error) from None
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


# --- the journal ----------------------------------------------------------------------------------

_HEAD = b'{"crc":"'
_MIDDLE = b'","r":'
_PAYLOAD = len(_HEAD) + 8 + len(_MIDDLE)

Place: TypeAlias = tuple[int, int]
"""Offset and length in bytes of a journal line, newline included."""


class Journal:
    """A crash-safe, append-only file of JSON objects.

    Every line is `{"crc":"8 hex digits","r":{...}}`; the CRC-32 covers the bytes of the object after `"r":`. On
    opening, an incomplete last line is removed and damaged lines are moved to `<name>.damaged` next to the file. The
    file is read line by line and never held in memory.

    Args:
        journal_path: The file; it is created if it does not exist.
        file_mode: Permissions of a new file.

    Attributes:
        damaged: Number of damaged lines found on opening.

    Raises:
        OSError: The file cannot be read or written.
        UserError: The file is not a journal.
    """

    def __init__(self, journal_path: Path, file_mode: int = 0o644) -> None:
        self.path = journal_path
        self.damaged = 0
        self._file = -1
        if journal_path.exists():
            self._recover()
        self._file = os.open(journal_path, os.O_RDWR | os.O_APPEND | os.O_CREAT, file_mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. All appended entries are already on disk."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def entries(self) -> list[Any]:
        """Return the objects of the file, in order."""
        return [entry for _, entry in self.placed()]

    def placed(self) -> Iterator[tuple[Place, Any]]:
        """Yield the objects of the file in order, each with its location."""
        line_start = 0
        with self.path.open("rb") as file_handle:
            for journal_line in file_handle:
                yield (line_start, len(journal_line)), json.loads(journal_line[_PAYLOAD:-2])
                line_start += len(journal_line)

    def at(self, line_span: Place) -> Any:
        """Return the object at a location.

        Raises:
            OSError: The file cannot be read.
            UserError: The line was changed after the file was opened.
        """
        line_start, line_length = line_span
        journal_line = os.pread(self._file, line_length, line_start)
        if not _is_intact(journal_line):
            raise UserError(f"{self.path} was modified while in use; run the same command again")
        return json.loads(journal_line[_PAYLOAD:-2])

    def append(self, new_entries: Iterable[Mapping[str, Any]]) -> list[Place]:
        """Write objects, flush them to disk and return their locations.

        Raises:
            OSError: The disk is full or fails; none of these objects remains in the file.
        """
        journal_lines = [_line(new_entry) for new_entry in new_entries]
        unwritten_bytes = memoryview(b"".join(journal_lines))
        append_offset = os.fstat(self._file).st_size
        try:
            while unwritten_bytes:
                unwritten_bytes = unwritten_bytes[os.write(self._file, unwritten_bytes) :]
            os.fsync(self._file)
        except BaseException:
            with contextlib.suppress(OSError):  # otherwise the next open removes the incomplete line
                os.ftruncate(self._file, append_offset)
            raise
        line_lengths = [len(journal_line) for journal_line in journal_lines]
        return list(zip(accumulate(line_lengths, initial=append_offset), line_lengths, strict=False))

    def _recover(self) -> None:
        """Remove an incomplete last line and move damaged lines to another file."""
        has_entries, has_foreign_text, byte_count, torn_bytes = False, False, 0, 0
        with self.path.open("rb") as file_handle:
            for journal_line in file_handle:
                byte_count += len(journal_line)
                if _is_intact(journal_line):
                    has_entries = True
                    continue
                line_content = journal_line.removesuffix(b"\n")
                has_entries = has_entries or _begins(line_content)
                has_foreign_text = has_foreign_text or bool(line_content)
                if journal_line.endswith(b"\n"):
                    self.damaged += 1
                else:
                    torn_bytes = len(journal_line)
        if has_foreign_text and not has_entries:
            raise UserError(f"{self.path} was not written by kvbench; move it away or choose another folder")
        if self.damaged:
            self._mend()
        elif torn_bytes:
            os.truncate(self.path, byte_count - torn_bytes)

    def _mend(self) -> None:
        damaged_path = self.path.with_name(f"{self.path.name}.damaged")
        with replacing(self.path) as partial_path:
            with (
                self.path.open("rb") as source_handle,
                partial_path.open("wb") as intact_handle,
                damaged_path.open("ab") as damaged_handle,
            ):
                for journal_line in source_handle:
                    if journal_line.endswith(b"\n"):
                        (intact_handle if _is_intact(journal_line) else damaged_handle).write(journal_line)
            partial_path.chmod(self.path.stat().st_mode)


@contextlib.contextmanager
def locked_journal(journal_path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[Journal]:
    """Open a journal with an exclusive lock, which other processes and threads wait for.

    Args:
        journal_path: The file, readable by its owner only; it is created if it does not exist.
        waiting: Called before waiting for another holder of the lock.

    Raises:
        UserError: The file cannot be read or written, now or later in the block.
    """
    try:
        journal_path.parent.mkdir(parents=True, exist_ok=True)
        with journal_path.with_suffix(".lock").open("a") as lock_handle:
            try:
                fcntl.flock(lock_handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock_handle, fcntl.LOCK_EX)
            with Journal(journal_path, 0o600) as journal:
                yield journal
    except OSError as error:
        raise cannot("write", journal_path, error) from None


def _line(journal_entry: Mapping[str, Any]) -> bytes:
    payload = json.dumps(journal_entry, separators=(",", ":")).encode()
    return _HEAD + b"%08x" % zlib.crc32(payload) + _MIDDLE + payload + b"}\n"


def _is_intact(journal_line: bytes) -> bool:
    """Return whether a line is complete, newline included, and matches its CRC."""
    payload = journal_line[_PAYLOAD:-2]
    return journal_line == _HEAD + b"%08x" % zlib.crc32(payload) + _MIDDLE + payload + b"}\n"


def _begins(journal_line: bytes) -> bool:
    """Return whether a damaged or incomplete line begins like a journal line."""
    return journal_line.startswith(_HEAD[: len(journal_line)]) and bool(journal_line)
