"""A judge's answers on disk: nothing is asked twice, whatever crashes, also by two runs at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbench.errors import UserError
from kvbench.files import Journal, cannot


class Answers:
    """The answers of a judge by key, in a `kvbench.files.Journal` that is locked while it is open.

    Args:
        path: The file; it is created if it does not exist.
        waiting: Called if another process holds the file, before this one waits for it.

    Raises:
        UserError: The file cannot be read or written.
    """

    def __init__(self, path: Path, waiting: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._lock = -1
        self._journal: Journal | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._journal = Journal(path, 0o600)
        except OSError as error:
            self.close()
            raise self._cannot(error) from None
        except BaseException:
            self.close()
            raise
        self._answers = {entry["key"]: entry["answer"] for entry in self._journal.entries()}

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
        """Release the file."""
        if self._journal is not None:
            self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def all(self) -> Mapping[str, str]:
        """The last answer of each key."""
        return self._answers

    def add(self, key: str, answer: str, about: Mapping[str, str]) -> None:
        """Keep an answer; it is on disk when this returns.

        Raises:
            UserError: The disk is full or fails; nothing of the answer remains in the file.
        """
        assert self._journal is not None
        try:
            self._journal.append([{"key": key, "answer": answer, **about}])
        except OSError as error:
            raise self._cannot(error) from None
        self._answers[key] = answer

    def _cannot(self, error: OSError) -> UserError:
        return cannot("write", self.path, error)
