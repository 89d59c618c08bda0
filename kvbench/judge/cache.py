"""A judge's answers on disk: nothing is asked twice, whatever crashes, also by two runs at once."""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbench.errors import UserError
from kvbench.runs.store import append_whole


class Answers:
    """An append-only file of answers by key, locked while it is open.

    Every line is the CRC-32 of what follows it, a space and a JSON object with the fields `key` and
    `answer` and what else is worth keeping. A torn tail is cut and a damaged line is passed over.

    Args:
        path: The file; it is made where there is none.
        waiting: Called where another process holds the file, before this one waits for it.

    Raises:
        UserError: The file cannot be read or written.
    """

    def __init__(self, path: Path, waiting: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._answers: dict[str, str] = {}
        self._file = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._recover()
        except OSError as error:
            self.close()
            raise self._cannot(error) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def all(self) -> Mapping[str, str]:
        """All answers by key, the last one of each."""
        return self._answers

    def add(self, key: str, answer: str, about: Mapping[str, str]) -> None:
        """Keep an answer; it is on disk when this returns.

        Raises:
            UserError: The disk is full or fails; nothing of the answer is left in the file.
        """
        payload = json.dumps({"key": key, "answer": answer, **about}).encode()
        try:
            append_whole(self._file, b"%08x " % zlib.crc32(payload) + payload + b"\n")
        except OSError as error:
            raise self._cannot(error) from None
        self._answers[key] = answer

    def _recover(self) -> None:
        with open(self._file, "rb", closefd=False) as file:
            *lines, tail = file.read().split(b"\n")
        for line in lines:
            payload = line[9:]
            if line[:9] == b"%08x " % zlib.crc32(payload):
                kept = json.loads(payload)
                self._answers[kept["key"]] = kept["answer"]
        if tail:
            os.ftruncate(self._file, os.fstat(self._file).st_size - len(tail))

    def _cannot(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror or error}")
