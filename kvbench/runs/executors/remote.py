"""A worker in its own process: it plans and answers shards, and sends the responses back."""

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
from kvbench.runs.schema import Response
from kvbench.runs.worker import Worker, loaded_model

Sent = Response | str
"""Item sent by a worker: a response, or a message for the user."""


class RemoteWorker:
    """Answers parts of a grid. It keeps its model and the plan of its last job.

    The worker plans its jobs itself: models, policies and data are read on its own machine and never sent. A machine
    whose prompts or answers would differ therefore has other keys, and is refused.

    Args:
        grid: The grid, as `Grid.to_dict` returns it.
        folder: Base folder of relative paths in the grid.
    """

    def __init__(self, grid: Mapping[str, Any], folder: str) -> None:
        self._grid, self._folder = Grid.from_dict(grid), folder
        # Everything about the model runs in one thread, because torch sets its thread count per thread.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._planned: tuple[JobName, Stage, Job] | None = None
        self._worker: tuple[str, Worker] | None = None
        self._held = ExitStack()

    def start(self) -> None:
        """Change to the folder.

        Raises:
            UserError: The machine has no such folder.
        """
        try:
            os.chdir(self._folder)
        except OSError as error:
            raise UserError(
                f"{socket.gethostname()} cannot use {self._folder}: {error.strerror}; "
                "start the run from a folder that all machines share"
            ) from None

    def answer(self, job_name: JobName, keys: frozenset[Key], failures: Mapping[str, str]) -> Iterator[list[Sent]]:
        """Generate responses of a job; yield them as soon as they exist.

        Args:
            keys: Keys of the responses, covering whole contexts or what is missing of them.
            failures: Errors of failed cells so far, by cell; they are not retried.

        Raises:
            UserError: The machine has too little memory, or plans other responses than the driver.
        """
        sent_queue: SimpleQueue[Sent | None] = SimpleQueue()
        future = self._thread.submit(self._answer, job_name, keys, failures, sent_queue.put)
        future.add_done_callback(lambda _: sent_queue.put(None))
        is_finished = False
        while not is_finished:
            received = [sent_queue.get()]
            while not sent_queue.empty():
                received.append(sent_queue.get())
            is_finished = received[-1] is None
            if new_items := [item for item in received if item is not None]:
                yield new_items
        future.result()

    def _answer(
        self,
        job_name: JobName,
        keys: frozenset[Key],
        failures: Mapping[str, str],
        send: Callable[[Sent], None],
    ) -> None:
        stage, job = self._plan(job_name, keys)
        with memory_of(stage.model):
            worker = self._load(stage, send)
            worker.store, worker.reporter = _Channel(set(keys), send), _Messages(send)
            worker.failed.update(failures)
            answer(worker, job.prompts, job.cells)

    def _plan(self, job_name: JobName, keys: frozenset[Key]) -> tuple[Stage, Job]:
        """Plan a job unless it is the last one planned, and check that it has these keys."""
        if self._planned is None or self._planned[0] != job_name:
            self._planned = None
            try:
                job_plan = plan(self._grid, lambda message: None, scored=False, only=job_name)
            except UserError as error:  # such as data that only the driver's machine has
                host_name = socket.gethostname()
                raise UserError(f"{host_name} cannot plan {job_name.task}: {error}") from None
            (stage,) = job_plan.stages
            (job,) = stage.jobs
            self._planned = (job_name, stage, job)
        _, stage, job = self._planned
        planned_keys = {key_of(cell, prompt) for cell in job.cells for prompt in job.prompts}
        if not keys <= planned_keys:
            raise UserError(
                f"{socket.gethostname()} plans other cells of {job_name.task} than the machine that started the run; "
                "give all machines the same packages, models, data and kind of device"
            )
        return stage, job

    def _load(self, stage: Stage, send: Callable[[Sent], None]) -> Worker:
        """Return the worker of a stage's model, freeing any other model first."""
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
    """All keys except a given set."""

    keys: frozenset[Key]

    def __contains__(self, key: object) -> bool:
        return key not in self.keys


@dataclass
class _Channel:
    """A worker's response sink, which sends responses away; only `wanted` keys are still missing."""

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
