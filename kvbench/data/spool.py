"""Sequences larger than memory: stored on disk and read item by item."""

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
"""Bytes of a sequence that stay in memory; most tasks never need the disk."""

T = TypeVar("T")


class Spool(Sequence[T]):
    """An append-only sequence on disk; every access creates its item anew.

    All sequences share one unnamed file in the temporary folder (`$TMPDIR`). It disappears with the last of them,
    however the process ends.

    Args:
        items: Initial items; anything that can be pickled.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._starts, self._sizes = array("Q"), array("Q")  # offsets and sizes in the file
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
        start_offset = self._file.append(b"".join(self._waiting))
        for item in self._waiting:
            self._starts.append(start_offset)
            self._sizes.append(len(item))
            start_offset += len(item)
        self._waiting, self._waiting_bytes = [], 0

    def __len__(self) -> int:
        return len(self._starts) + len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        positions = range(len(self))[index]
        return self._read(positions) if isinstance(positions, int) else [self._read(position) for position in positions]

    def __iter__(self) -> Iterator[T]:
        return map(self._read, range(len(self)))

    def __eq__(self, compared: object) -> bool:
        if not isinstance(compared, Sequence) or len(self) != len(compared):
            return NotImplemented
        return all(item == other_item for item, other_item in zip(self, compared, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list

    def _read(self, position: int) -> T:
        written_count = len(self._starts)
        if position >= written_count:
            pickled = self._waiting[position - written_count]
        else:
            assert self._file is not None
            pickled = self._file.read(self._starts[position], self._sizes[position])
        item: T = pickle.loads(pickled)
        return item


class _File:
    """An unnamed file that many sequences append to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0
        with _telling():
            # The sequences close it: it disappears with the last of them.
            self._file = tempfile.TemporaryFile(prefix="kvbench-", buffering=0)  # noqa: SIM115

    def append(self, payload: bytes) -> int:
        """Write at the end; return the offset."""
        with self._lock, _telling():
            start_offset, remaining = self._size, memoryview(payload)
            while remaining:
                written_bytes = os.pwrite(self._file.fileno(), remaining, self._size)
                remaining, self._size = remaining[written_bytes:], self._size + written_bytes
            return start_offset

    def read(self, start_offset: int, byte_count: int) -> bytes:
        return os.pread(self._file.fileno(), byte_count, start_offset)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Turn disk errors into a message that says what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot keep prompts in {tempfile.gettempdir()}: {error.strerror or error}; "
            "set TMPDIR to a folder with more room"
        ) from None


_lately: weakref.ref[_File] | None = None


def _shared_file() -> _File:
    """Return the file shared by the existing sequences, or a new one."""
    global _lately
    shared_file = _lately() if _lately is not None else None
    if shared_file is None:
        shared_file = _File()
        _lately = weakref.ref(shared_file)
    return shared_file
