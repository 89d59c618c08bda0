"""Ray's interface in this process, with workers that die exactly when a test says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


class FakeTaskError(Exception):
    """An error that a worker raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeDeath(Exception):
    """A worker is gone."""


def died(reason: str) -> FakeDeath:
    """The error of a dead worker, in the form of Ray's."""
    return FakeDeath(f"The actor died unexpectedly before finishing this task.\n\tclass_name: RemoteWorker\n{reason}")


class FakeRay:
    """A cluster of one process.

    Args:
        lives: After how many messages each worker dies, in the order in which they start; further
            workers live on. 0 dies while it starts, and the machine of -1 before that.
        seed: Decides which worker is heard next.
    """

    exceptions = SimpleNamespace(
        RayTaskError=FakeTaskError, RayError=(FakeDeath, FakeTaskError), OutOfMemoryError=FakeDeath
    )

    def __init__(self, lives: list[int] | None = None, seed: int = 0, cpus: int = 2) -> None:
        self.lives, self.cpus = list(lives or []), cpus
        self.random = random.Random(seed)
        self.started: list[Actor] = []
        self.killed: list[Actor] = []

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "Resources": {"CPU": float(self.cpus)}},
            {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        ]

    def remote(self, **options: Any) -> Any:
        def hired(kind: type) -> Any:
            return SimpleNamespace(remote=lambda *args: self._start(kind, *args))

        return hired

    def _start(self, kind: type, *args: Any) -> Actor:
        actor = Actor(kind(*args), self.lives.pop(0) if self.lives else 10**9)
        self.started.append(actor)
        return actor

    def wait(self, waits: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        assert num_returns == 1 and waits, "a driver that waits for nothing would hang"
        return [self.random.choice(waits)], []

    def get(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference.value

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


class Actor:
    """A worker whose messages come one by one."""

    def __init__(self, worker: Any, life: int) -> None:
        self.worker, self.life = worker, life
        self.start = SimpleNamespace(remote=self._start)
        streaming = SimpleNamespace(remote=self._answer)
        self.answer = SimpleNamespace(options=lambda **_: streaming)

    def _start(self) -> Any:
        if self.life < 0:
            return died("its node has died. Node Id: 0\nThe actor never ran - it was cancelled")
        if not self.life:
            return died("killed at the start. And more")
        return SimpleNamespace(value=self.worker.start())

    def _answer(self, *args: Any) -> Iterator[Any]:
        try:
            for batch in self.worker.answer(*args):
                for one in batch:
                    if not self.life:
                        yield died("killed. And more")
                        return
                    self.life -= 1
                    yield SimpleNamespace(value=[one])
        except Exception as error:
            yield FakeTaskError(error)
