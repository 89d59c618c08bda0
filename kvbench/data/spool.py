"""Sequences that can be larger than the memory: they lie on the disk and are read item by item."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import threading
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

from kvbench.errors import UserError

_HELD = 1 << 18
"""Bytes of a sequence that stay in memory: most tasks never need the disk."""

T = TypeVar("T")


class Spool(Sequence[T]):
    """A sequence that grows at its end; every access makes its item anew.

    All of them share one file without a name in the folder for temporary files (`$TMPDIR`). It goes
    with the last of them, however the process ends.

    Args:
        items: What it begins with; anything that can be pickled.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._starts, self._sizes = array("Q"), array("Q")  # of what is in the file
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._file: _File | None = None
        for item in items:
            self.append(item)

    def append(self, item: T) -> None:
        """Add an item.

        Raises:
            UserError: The disk is full or fails.
        """
        self._waiting.append(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
        self._waiting_bytes += len(self._waiting[-1])
        if self._waiting_bytes > _HELD:
            self._write()

    def _write(self) -> None:
        self._file = self._file or _shared_file()
        start = self._file.append(b"".join(self._waiting))
        for item in self._waiting:
            self._starts.append(start)
            self._sizes.append(len(item))
            start += len(item)
        self._waiting, self._waiting_bytes = [], 0

    def __len__(self) -> int:
        return len(self._starts) + len(self._waiting)

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> list[T]: ...

    def __getitem__(self, place: int | slice) -> T | list[T]:
        places = range(len(self))[place]
        return self._read(places) if isinstance(places, int) else [self._read(i) for i in places]

    def __iter__(self) -> Iterator[T]:
        return map(self._read, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list

    def _read(self, place: int) -> T:
        written = len(self._starts)
        if place >= written:
            data = self._waiting[place - written]
        else:
            assert self._file is not None
            data = self._file.read(self._starts[place], self._sizes[place])
        item: T = pickle.loads(data)
        return item


class _File:
    """A file without a name, which many sequences append to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0
        with _telling():
            # Its sequences close it: it goes with the last of them.
            self._file = tempfile.TemporaryFile(prefix="kvbench-", buffering=0)  # noqa: SIM115

    def append(self, data: bytes) -> int:
        """Write at the end; return where that was."""
        with self._lock, _telling():
            start, left = self._size, memoryview(data)
            while left:
                written = os.pwrite(self._file.fileno(), left, self._size)
                left, self._size = left[written:], self._size + written
            return start

    def read(self, start: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, start)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Say what to do if the disk fails."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot keep prompts in {tempfile.gettempdir()}: {error.strerror or error}; set "
            "TMPDIR to a folder with more room"
        ) from None


_lately: weakref.ref[_File] | None = None


def _shared_file() -> _File:
    """The file of the sequences that there are, or a new one."""
    global _lately
    file = _lately() if _lately is not None else None
    if file is None:
        file = _File()
        _lately = weakref.ref(file)
    return file
