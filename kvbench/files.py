"""Files: the cache folder, digests, files that appear whole or not at all, and the journal."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeAlias

from kvbench.errors import UserError


def cache_dir() -> Path:
    """The folder for generated data: `$KVBENCH_CACHE`, or `kvbench` in the user's cache."""
    if os.environ.get("KVBENCH_CACHE"):
        return Path(os.environ["KVBENCH_CACHE"])
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "kvbench"


def cannot(verb: str, target_path: str | Path, error: OSError) -> UserError:
    """Describe in one line why a file cannot be read or written."""
    return UserError(f"cannot {verb} {target_path}: {error.strerror or error}")


# --- digests --------------------------------------------------------------------------------------


def digest_of(value: object) -> str:
    """16 hex digits of any JSON value; the order of keys in mappings does not count."""
    json_text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(json_text.encode()).hexdigest()[:16]


State: TypeAlias = tuple[int, ...]
"""What tells one content of a file from another without reading it; see `state_of`."""

_SETTLED = 2 * 10**9
"""Nanoseconds after a change: a second change could leave an earlier file's times as they are."""


def state_of(file_path: Path) -> State:
    """Size, modification time, change time, inode and device of a file.

    Tools such as `cp -p` and `rsync -t` keep size and modification time; the change time is the
    kernel's own.

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


def file_digests(file_paths: Iterable[Path]) -> list[str]:
    """SHA-256 of each file.

    Large files are read once: their digests are cached by path and `state_of`.

    Raises:
        OSError: A file cannot be read.
    """
    cache_path = cache_dir() / "digests.json"
    cached_digests = _known_digests(cache_path)
    previous_digests = dict(cached_digests)
    digests = []
    for file_path in file_paths:
        resolved_name, file_state = str(file_path.resolve()), list(state_of(file_path))
        if resolved_name not in cached_digests or cached_digests[resolved_name][0] != file_state:
            with file_path.open("rb") as file_handle:
                cached_digests[resolved_name] = [
                    file_state,
                    hashlib.file_digest(file_handle, "sha256").hexdigest(),
                ]
        digests.append(cached_digests[resolved_name][1])
        if time.time_ns() - file_state[2] < _SETTLED or list(state_of(file_path)) != file_state:
            del cached_digests[resolved_name]
    if cached_digests != previous_digests:
        with contextlib.suppress(OSError, UserError):  # it only saves time
            cache_path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cache_path) as partial_path:
                partial_path.write_text(json.dumps(cached_digests))
    return digests


def _known_digests(cache_path: Path) -> dict[str, Any]:
    """State and digest by path; entries of earlier versions are dropped."""
    try:
        cached_digests = json.loads(cache_path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(cached_digests, dict):
        return {}
    return {
        resolved_name: cached_digest
        for resolved_name, cached_digest in cached_digests.items()
        if isinstance(cached_digest, list) and len(cached_digest) == 2
    }


# --- whole files ----------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(target_path: Path) -> Iterator[Path]:
    """Give a path to write to; it takes the place of `target_path` once everything is on disk.

    If `target_path` is a symbolic link, the file that it points to is replaced.

    Raises:
        UserError: The file cannot be written; `target_path` is unchanged.
    """
    if os.path.islink(target_path):
        target_path = Path(os.path.realpath(target_path))
    partial_path = target_path.with_name(f".{target_path.name}.{os.getpid()}.part")
    try:
        yield partial_path
        _sync(partial_path)
        partial_path.replace(target_path)
        _sync(target_path.parent)
    except OSError as error:
        raise cannot("write", target_path, error) from None
    finally:
        with contextlib.suppress(OSError):  # such as a name that is too long, which never existed
            partial_path.unlink()


def unfinished(file_path: Path) -> list[Path]:
    """What processes have begun to write to take the place of `file_path`; they may be running."""
    return sorted(file_path.parent.glob(f".{glob.escape(file_path.name)}.*.part"))


def write_whole(target_path: Path, content: bytes) -> None:
    """Write a file and the folders above it; the file appears once everything is on disk.

    A device such as `/dev/stdout` or a named pipe is opened and written to instead.

    Raises:
        UserError: The file cannot be written; an earlier one is unchanged.
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
    """Whether a path names a device, a pipe or, as `/dev/stdout` does, a file that is open."""
    return not stat.S_ISREG(file_path.stat().st_mode) or file_path.absolute().parts[1] in (
        "dev",
        "proc",
    )


def _sync(file_path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(file_path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write to; it becomes `folder` once all of its files are on disk.

    If another process makes `folder` in the meantime, that folder stays and this one is discarded.

    Raises:
        UserError: The folder cannot be written; `folder` does not exist.
    """
    partial_folder = folder.with_name(f".{folder.name}.{os.getpid()}.part")
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
"""Where a line of a journal is: its first byte, and its bytes with the newline."""


class Journal:
    """An append-only file of JSON objects that survives a crash at any moment.

    Every line is `{"crc":"8 hex digits","r":{...}}`; the CRC-32 covers the bytes of the object
    after `"r":`. When the file is opened, a torn last line is cut off. A damaged line is moved to
    `<name>.damaged` next to the file, so that nothing is lost. The file is read line by line and
    never held in memory.

    Args:
        path: The file; it is created if it does not exist.
        mode: Permissions of a new file.

    Attributes:
        damaged: How many damaged lines were found when the file was opened.

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
        """Close the file. Everything that was appended is already on disk."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def entries(self) -> list[Any]:
        """The objects of the file, in order."""
        return [entry for _, entry in self.placed()]

    def placed(self) -> Iterator[tuple[Place, Any]]:
        """Read the objects of the file one at a time, in order, each with its place."""
        line_start = 0
        with self.path.open("rb") as file_handle:
            for journal_line in file_handle:
                yield (line_start, len(journal_line)), json.loads(journal_line[_PAYLOAD:-2])
                line_start += len(journal_line)

    def at(self, line_span: Place) -> Any:
        """Read the object at a place.

        Raises:
            OSError: The file cannot be read.
            UserError: The line is no longer what it was when the file was opened.
        """
        line_start, line_length = line_span
        journal_line = os.pread(self._file, line_length, line_start)
        if not _is_intact(journal_line):
            raise UserError(f"{self.path} was changed while it was in use; run the same command again")
        return json.loads(journal_line[_PAYLOAD:-2])

    def append(self, new_entries: Iterable[Mapping[str, Any]]) -> list[Place]:
        """Write objects and wait until the disk has them.

        Returns:
            The place of each object.

        Raises:
            OSError: The disk is full or fails; nothing of these objects remains in the file.
        """
        journal_lines = [_line(new_entry) for new_entry in new_entries]
        unwritten_bytes = memoryview(b"".join(journal_lines))
        append_offset = os.fstat(self._file).st_size
        try:
            while unwritten_bytes:
                unwritten_bytes = unwritten_bytes[os.write(self._file, unwritten_bytes) :]
            os.fsync(self._file)
        except BaseException:
            with contextlib.suppress(OSError):  # the next open cuts off a torn line as well
                os.ftruncate(self._file, append_offset)
            raise
        line_lengths = [len(journal_line) for journal_line in journal_lines]
        return list(zip(accumulate(line_lengths, initial=append_offset), line_lengths, strict=False))

    def _recover(self) -> None:
        """Cut off a torn line and move damaged ones aside."""
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
            raise UserError(f"{self.path} was not written by kvbench, so nothing is added to it")
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
    """Open a journal that no other process or thread can open meanwhile.

    Args:
        journal_path: The file, readable by its owner only; it is created if it does not exist.
        waiting: Called if another holds the journal, before this one waits for it.

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
    """Whether a line is whole, with its newline, and agrees with its CRC."""
    payload = journal_line[_PAYLOAD:-2]
    return journal_line == _HEAD + b"%08x" % zlib.crc32(payload) + _MIDDLE + payload + b"}\n"


def _begins(journal_line: bytes) -> bool:
    """Whether a line could be the beginning of a damaged or torn one."""
    return journal_line.startswith(_HEAD[: len(journal_line)]) and bool(journal_line)
