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
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvbench"


def cannot(verb: str, path: str | Path, error: OSError) -> UserError:
    """Describe in one line why a file cannot be read or written."""
    return UserError(f"cannot {verb} {path}: {error.strerror or error}")


# --- digests --------------------------------------------------------------------------------------


def digest_of(value: object) -> str:
    """16 hex digits of any JSON value; the order of keys in mappings does not count."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


State: TypeAlias = tuple[int, ...]
"""What tells one content of a file from another without reading it; see `state_of`."""

_SETTLED = 2 * 10**9
"""Nanoseconds after a change: a second change could leave an earlier file's times as they are."""


def state_of(path: Path) -> State:
    """Size, modification time, change time, inode and device of a file.

    Tools such as `cp -p` and `rsync -t` keep size and modification time; the change time is the
    kernel's own.

    Raises:
        OSError: The file cannot be read.
    """
    at = path.stat()
    return (at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino, at.st_dev)


def file_digests(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of each file.

    Large files are read once: their digests are cached by path and `state_of`.

    Raises:
        OSError: A file cannot be read.
    """
    cached = cache_dir() / "digests.json"
    known = _known_digests(cached)
    before = dict(known)
    digests = []
    for path in paths:
        name, state = str(path.resolve()), list(state_of(path))
        if name not in known or known[name][0] != state:
            with path.open("rb") as file:
                known[name] = [state, hashlib.file_digest(file, "sha256").hexdigest()]
        digests.append(known[name][1])
        if time.time_ns() - state[2] < _SETTLED or list(state_of(path)) != state:
            del known[name]
    if known != before:
        with contextlib.suppress(OSError, UserError):  # it only saves time
            cached.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cached) as part:
                part.write_text(json.dumps(known))
    return digests


def _known_digests(path: Path) -> dict[str, Any]:
    """State and digest by path; entries of earlier versions are dropped."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, list) and len(v) == 2}


# --- whole files ----------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; it takes the place of `path` once everything is on disk.

    If `path` is a symbolic link, the file that it points to is replaced.

    Raises:
        UserError: The file cannot be written; `path` is unchanged.
    """
    if os.path.islink(path):
        path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        _sync(part)
        part.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from None
    finally:
        with contextlib.suppress(OSError):  # such as a name that is too long, which never existed
            part.unlink()


def unfinished(path: Path) -> list[Path]:
    """What processes have begun to write to take the place of `path`; they may be running."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.*.part"))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file and the folders above it; the file appears once everything is on disk.

    A device such as `/dev/stdout` or a named pipe is opened and written to instead.

    Raises:
        UserError: The file cannot be written; an earlier one is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and _is_stream(path):
            with open(os.open(path, os.O_WRONLY | os.O_APPEND), "wb") as stream:
                stream.write(content)
            return
    except OSError as error:
        raise cannot("write", path, error) from None
    with replacing(path) as part:
        part.write_bytes(content)


def _is_stream(path: Path) -> bool:
    """Whether a path names a device, a pipe or, as `/dev/stdout` does, a file that is open."""
    return not stat.S_ISREG(path.stat().st_mode) or path.absolute().parts[1] in ("dev", "proc")


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write to; it becomes `path` once all of its files are on disk.

    If another process makes `path` in the meantime, that folder stays and this one is discarded.

    Raises:
        UserError: The folder cannot be written; `path` does not exist.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        for file in part.rglob("*"):
            _sync(file)
        try:
            part.rename(path)
        except OSError:
            if not path.is_dir():
                raise
        _sync(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


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

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path = path
        self.damaged = 0
        self._file = -1
        if path.exists():
            self._recover()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)

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
        start = 0
        with self.path.open("rb") as file:
            for line in file:
                yield (start, len(line)), json.loads(line[_PAYLOAD:-2])
                start += len(line)

    def at(self, place: Place) -> Any:
        """Read the object at a place.

        Raises:
            OSError: The file cannot be read.
            UserError: The line is no longer what it was when the file was opened.
        """
        start, size = place
        line = os.pread(self._file, size, start)
        if not _is_intact(line):
            raise UserError(
                f"{self.path} was changed while it was in use; run the same command again"
            )
        return json.loads(line[_PAYLOAD:-2])

    def append(self, objects: Iterable[Mapping[str, Any]]) -> list[Place]:
        """Write objects and wait until the disk has them.

        Returns:
            The place of each object.

        Raises:
            OSError: The disk is full or fails; nothing of these objects remains in the file.
        """
        lines = [_line(one) for one in objects]
        left = memoryview(b"".join(lines))
        start = os.fstat(self._file).st_size
        try:
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except BaseException:
            with contextlib.suppress(OSError):  # the next open cuts off a torn line as well
                os.ftruncate(self._file, start)
            raise
        sizes = [len(line) for line in lines]
        return list(zip(accumulate(sizes, initial=start), sizes, strict=False))

    def _recover(self) -> None:
        """Cut off a torn line and move damaged ones aside."""
        ours, foreign, size, tail = False, False, 0, 0
        with self.path.open("rb") as file:
            for line in file:
                size += len(line)
                if _is_intact(line):
                    ours = True
                    continue
                text = line.removesuffix(b"\n")
                ours = ours or _begins(text)
                foreign = foreign or bool(text)
                if line.endswith(b"\n"):
                    self.damaged += 1
                else:
                    tail = len(line)
        if foreign and not ours:
            raise UserError(f"{self.path} was not written by kvbench, so nothing is added to it")
        if self.damaged:
            self._mend()
        elif tail:
            os.truncate(self.path, size - tail)

    def _mend(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with replacing(self.path) as part:
            with self.path.open("rb") as file, part.open("wb") as kept, aside.open("ab") as broken:
                for line in file:
                    if line.endswith(b"\n"):
                        (kept if _is_intact(line) else broken).write(line)
            part.chmod(self.path.stat().st_mode)


@contextlib.contextmanager
def locked_journal(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[Journal]:
    """Open a journal that no other process or thread can open meanwhile.

    Args:
        path: The file, readable by its owner only; it is created if it does not exist.
        waiting: Called if another holds the journal, before this one waits for it.

    Raises:
        UserError: The file cannot be read or written, now or later in the block.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            with Journal(path, 0o600) as journal:
                yield journal
    except OSError as error:
        raise cannot("write", path, error) from None


def _line(value: Mapping[str, Any]) -> bytes:
    payload = json.dumps(value, separators=(",", ":")).encode()
    return _HEAD + b"%08x" % zlib.crc32(payload) + _MIDDLE + payload + b"}\n"


def _is_intact(line: bytes) -> bool:
    """Whether a line is whole, with its newline, and agrees with its CRC."""
    payload = line[_PAYLOAD:-2]
    return line == _HEAD + b"%08x" % zlib.crc32(payload) + _MIDDLE + payload + b"}\n"


def _begins(line: bytes) -> bool:
    """Whether a line could be the beginning of a damaged or torn one."""
    return line.startswith(_HEAD[: len(line)]) and bool(line)
