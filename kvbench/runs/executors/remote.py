"""A worker in a process of its own: it plans and answers shards, and sends the responses back."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from kvbench.errors import UserError
from kvbench.progress import Silent
from kvbench.runs.answers import key_of
from kvbench.runs.executors.base import answer, memory_of, worker_of
from kvbench.runs.grid import Grid
from kvbench.runs.index import Key
from kvbench.runs.planning import Job, JobName, Stage, plan
from kvbench.runs.store import Response
from kvbench.runs.worker import Worker, loaded_model

Sent = Response | str
"""What a worker sends: a response, or a line for the user."""


class RemoteWorker:
    """Answers parts of a grid. It keeps its model, and the plan of its last job.

    The worker plans its jobs itself: models, policies and data are read on its machine, nothing of
    them is sent. A machine that would ask or answer differently therefore has other keys, and is
    refused.

    Args:
        grid: The grid, as `Grid.to_dict` gives it.
        folder: The folder that relative paths in the grid start from.
    """

    def __init__(self, grid: Mapping[str, Any], folder: str) -> None:
        self._grid, self._folder = Grid.from_dict(grid), folder
        # Everything about the model happens in one thread: torch counts threads per thread.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._planned: tuple[JobName, Stage, Job] | None = None
        self._worker: tuple[str, Worker] | None = None
        self._held = ExitStack()

    def start(self) -> None:
        """Go to the folder.

        Raises:
            UserError: The machine has no such folder.
        """
        try:
            os.chdir(self._folder)
        except OSError as error:
            raise UserError(
                f"{socket.gethostname()} cannot use {self._folder}: {error.strerror}; start the "
                "run from a folder that all machines share"
            ) from None

    def answer(
        self, name: JobName, keys: frozenset[Key], failed: Mapping[str, str]
    ) -> Iterator[list[Sent]]:
        """Generate responses of a job; yield them as soon as they exist.

        Args:
            name: The job.
            keys: The keys of the responses, of whole contexts or what is missing of them.
            failed: Why cells have failed so far, by cell; they are not tried again.

        Raises:
            UserError: The machine has too little memory, or plans other responses than the driver.
        """
        sent: SimpleQueue[Sent | None] = SimpleQueue()
        work = self._thread.submit(self._answer, name, keys, failed, sent.put)
        work.add_done_callback(lambda _: sent.put(None))
        over = False
        while not over:
            batch = [sent.get()]
            while not sent.empty():
                batch.append(sent.get())
            over = batch[-1] is None
            if news := [one for one in batch if one is not None]:
                yield news
        work.result()

    def _answer(
        self,
        name: JobName,
        keys: frozenset[Key],
        failed: Mapping[str, str],
        send: Callable[[Sent], None],
    ) -> None:
        stage, job = self._plan(name, keys)
        with memory_of(stage.model):
            worker = self._load(stage, send)
            worker.store, worker.reporter = _Channel(set(keys), send), _Messages(send)
            worker.failed.update(failed)
            answer(worker, job.prompts, job.cells)

    def _plan(self, name: JobName, keys: frozenset[Key]) -> tuple[Stage, Job]:
        """Plan a job, if it is not the last one, and check that it has these keys."""
        if self._planned is None or self._planned[0] != name:
            self._planned = None
            try:
                planned = plan(self._grid, lambda text: None, scored=False, only=name)
            except UserError as error:  # such as data that only the driver's machine has
                host = socket.gethostname()
                raise UserError(f"{host} cannot plan {name.task}: {error}") from None
            (stage,) = planned.stages
            (job,) = stage.jobs
            self._planned = (name, stage, job)
        _, stage, job = self._planned
        own = {key_of(cell, prompt) for cell in job.cells for prompt in job.prompts}
        if not keys <= own:
            raise UserError(
                f"{socket.gethostname()} plans other cells of {name.task} than the machine "
                "that the run was started on; give all machines the same packages, models, data "
                "and kind of device"
            )
        return stage, job

    def _load(self, stage: Stage, send: Callable[[Sent], None]) -> Worker:
        """The worker of a stage's model; another model is given up first."""
        if self._worker is None or self._worker[0] != stage.model:
            self._worker = None
            self._held.close()
            model = self._held.enter_context(loaded_model(stage, self._grid, send))
            channel, messages = _Channel(set(), send), _Messages(send)
            worker = worker_of(model, stage, self._grid, channel, messages)
            self._worker = (stage.model, worker)
        return self._worker[1]


@dataclass(frozen=True)
class _AllBut(Container[Key]):
    """Every key but these."""

    keys: frozenset[Key]

    def __contains__(self, key: object) -> bool:
        return key not in self.keys


@dataclass
class _Channel:
    """A worker's `Outlet` that sends responses away; only `wanted` are still to be generated."""

    wanted: set[Key]
    send: Callable[[Sent], None]

    def keys(self) -> Container[Key]:
        return _AllBut(frozenset(self.wanted))

    def append(self, responses: Sequence[Response]) -> None:
        for response in responses:
            if not response.error:
                self.wanted.discard(response.key)
            self.send(response)


class _Messages(Silent):
    """Sends messages away. The driver counts the responses itself."""

    def __init__(self, send: Callable[[Sent], None]) -> None:
        self._send = send

    def message(self, text: str) -> None:
        """See `kvbench.progress.Reporter`."""
        self._send(text)
