"""Ray executor: generates responses on every core or GPU of this machine or of a cluster.

Only the driver writes: workers send it their responses as they are generated. The journal of a run is therefore as
crash-safe as that of a run in one process, and another worker generates whatever a lost worker had not sent.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvbench import native
from kvbench.engine.kernels import launch
from kvbench.engine.threads import available_cores
from kvbench.errors import UserError, first_lines
from kvbench.progress import Reporter
from kvbench.runs.executors.base import Unfinished
from kvbench.runs.executors.remote import RemoteWorker, Sent
from kvbench.runs.executors.shards import Queue, Shard, shards_of
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, JobName
from kvbench.runs.schema import Response
from kvbench.runs.store import RunStore

ADDRESS = "RAY_ADDRESS"

_PASSED_ON = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "KVBENCH_CACHE"),
    *(native.SWITCH, launch.SWITCH),
)
"""Environment variables that workers copy from the driver. None of them is secret."""

_ANSWER_S = 10
_FRAME, _SETTINGS = 9, 4
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
"""Opening of an HTTP/2 connection, on which gRPC and therefore Ray is built, with an empty settings frame
(RFC 9113, 3.4 and 6.5); the server's first frame is a settings frame too."""

_STORE_BYTES = 80_000_000
"""Ray's shared memory on this machine in bytes; responses are small."""

_HOPELESS = 5
"""Number of consecutive lost workers without a response after which the run gives up."""

_NEVER_RAN = ("its node has died", "The actor never ran")
"""What Ray says, in the text of its error alone, of a worker whose machine died before the worker began."""


def run_on_ray(unfinished: Sequence[Unfinished], grid: Grid, store: RunStore, reporter: Reporter) -> None:
    """Run the Ray executor; see `kvbench.runs.executors.base.Executor`."""
    ray = _imported()
    needs = _needs_of(grid, unfinished)
    with _connected(ray, grid, reporter) as location:
        capacity = grid.workers or _room(ray, needs)
        if not capacity:
            raise UserError(f"no machine of {location} has {needs}; use a smaller --gpus-per-cell, or --device cpu")
        shards = shards_of([stage for stage, _ in unfinished], store.keys(), capacity)
        jobs = {JobName.of(stage, job): job for stage, _ in unfinished for job in stage.jobs}
        crew = _Crew(ray, grid, needs, store, reporter, Queue(shards), jobs)
        worker_count = min(capacity, len(shards))
        reporter.message(f"{location}: {worker_count} worker{'s' * (worker_count > 1)} with {needs} each")
        reporter.start(
            sum(stage.responses for stage in unfinished),
            ", ".join(stage.stage.model for stage in unfinished),
            "responses",
        )
        try:
            crew.work(worker_count)
        finally:
            reporter.stop()
            crew.dismiss()


@dataclass(frozen=True)
class _Needs:
    """Resources of a worker."""

    cpus: int
    gpus: float

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' * (self.cpus > 1)}"
        return f"{cpus} and {self.gpus:g} GPU{'s' * (self.gpus > 1)}" if self.gpus else cpus


def _needs_of(grid: Grid, unfinished: Sequence[Unfinished]) -> _Needs:
    cuda = any(stage.device.type == "cuda" for stage, _ in unfinished)
    gpus = float(cuda) if grid.gpus_per_cell is None else grid.gpus_per_cell
    # A Ray worker has one thread unless OMP_NUM_THREADS is set.
    return _Needs(torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else 1, gpus)


def _imported() -> Any:
    """Return the package `ray`.

    Raises:
        UserError: It is not installed.
    """
    try:
        import ray  # an optional package, and slow to import
    except ImportError:
        raise UserError("the executor ray needs the ray package; run: pip install 'kvbench[ray]'") from None
    return ray


@contextmanager
def _connected(ray: Any, grid: Grid, reporter: Reporter) -> Iterator[str]:
    """Connect to the cluster, or start Ray on this machine; yield its name for messages.

    Raises:
        UserError: There is no cluster at the address.
    """
    if ray.is_initialized():  # by a program that uses kvbench as a library and closes Ray itself
        yield "Ray"
        return
    address = grid.ray_address or os.environ.get(ADDRESS) or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {
            "num_cpus": max(available_cores(), grid.workers or 0),
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
        }
    reporter.message("starting Ray" if address == "local" else f"connecting to Ray at {address}")
    try:
        _check_port(address)
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"cannot reach Ray at {address}: {first_lines(error)}; "
            "start it with: ray start --head (and set RAY_AUTH_MODE=token if it uses a token)"
        ) from None
    try:
        yield "Ray on this machine" if address == "local" else f"Ray at {address}"
    finally:
        ray.shutdown()


def _check_port(address: str) -> None:
    """Refuse a `HOST:PORT` without a Ray server, because Ray would try for minutes or forever.

    Raises:
        OSError: There is no connection, or no gRPC server within `_ANSWER_S` seconds.
        ValueError: The port is out of range.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    if len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise ValueError("a port is a number from 1 to 65535")
    with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
            return
        try:
            connection.sendall(_HELLO)
            frame = connection.makefile("rb").read(_FRAME)
        except OSError:
            frame = b""
    if len(frame) < _FRAME or frame[3] != _SETTINGS:
        raise OSError("what listens there is not Ray")


def _room(ray: Any, needs: _Needs) -> int:
    """Return the number of workers that fit on the machines."""
    worker_count = 0
    for node in ray.nodes():
        if node["Alive"]:
            node_workers = node["Resources"].get("CPU", 0) // needs.cpus
            if needs.gpus:
                node_gpus = node["Resources"].get("GPU", 0)
                gpu_workers = int(node_gpus) * int(1 / needs.gpus) if needs.gpus < 1 else node_gpus // needs.gpus
                node_workers = min(node_workers, gpu_workers)
            worker_count += int(node_workers)
    return worker_count


@dataclass
class _Worker:
    """A worker and its task: `waits` refers to its start or to the stream of a shard."""

    actor: Any
    waits: Any
    shard: Shard | None = None
    last: JobName | None = None


@dataclass
class _Crew:
    """The workers of a run and the shards assigned to them.

    Attributes:
        failed: Errors of failed cells, by cell; they are not retried.
        losses: Workers lost since the last response, without those that never ran.
    """

    ray: Any
    grid: Grid
    needs: _Needs
    store: RunStore
    reporter: Reporter
    queue: Queue
    jobs: Mapping[JobName, Job]
    workers: list[_Worker] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    losses: int = 0

    def __post_init__(self) -> None:
        self._said: set[str] = set()
        actor_options: dict[str, Any] = {"num_cpus": self.needs.cpus, "num_gpus": self.needs.gpus}
        passed_variables = {variable: os.environ[variable] for variable in _PASSED_ON if variable in os.environ}
        if passed_variables:
            actor_options["runtime_env"] = {"env_vars": passed_variables}
        self._hired = self.ray.remote(**actor_options)(RemoteWorker)

    def work(self, worker_count: int) -> None:
        """Generate everything with `worker_count` workers.

        Raises:
            UserError: A worker cannot do its part, or every worker is lost.
        """
        for _ in range(worker_count):
            self._hire()
        while self.queue.pending or self.queue.taken:
            waiting = [worker.waits for worker in self.workers if worker.waits is not None]
            ready_results, _ = self.ray.wait(waiting, num_returns=1)
            for worker in [candidate for candidate in self.workers if candidate.waits is ready_results[0]]:
                self._attend(worker)

    def dismiss(self) -> None:
        """End all workers."""
        for worker in self.workers:
            self.ray.kill(worker.actor)

    def _hire(self) -> None:
        actor = self._hired.remote(self.grid.to_dict(), os.getcwd())
        self.workers.append(_Worker(actor, actor.start.remote()))

    def _attend(self, worker: _Worker) -> None:
        """Receive a worker's results or give it work; replace it if it is lost."""
        errors = self.ray.exceptions
        self.workers.remove(worker)  # Ray prefers the first in the list, so move this one to the end
        self.workers.append(worker)
        try:
            if worker.shard is None:
                self.ray.get(worker.waits)
                self._assign(worker)
            else:
                self._receive(self.ray.get(next(worker.waits)))
        except StopIteration:  # the shard is done
            assert worker.shard is not None
            self.queue.finish(worker.shard)
            self._assign(worker)
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except errors.RayError as error:
            self._replace(worker, error)

    def _assign(self, worker: _Worker) -> None:
        worker.shard = worker.waits = None
        while self.queue.pending and worker.shard is None:
            shard = self.queue.take(worker.last)
            keys = shard.missing(self.jobs[shard.job], self.store.keys())
            if not keys:  # a worker was lost after its last response
                self.queue.finish(shard)
                continue
            worker.shard, worker.last = shard, shard.job
            streaming = worker.actor.answer.options(num_returns="streaming")
            worker.waits = streaming.remote(shard.job, keys, self.failed)

    def _receive(self, received: Sequence[Sent]) -> None:
        responses = [item for item in received if isinstance(item, Response)]
        for message in [item for item in received if isinstance(item, str)]:
            if message not in self._said:  # every worker sends it
                self.reporter.message(message)
            self._said.add(message)
        self.store.append(responses)
        self.failed.update((response.cell, response.error) for response in responses if response.error)
        self.reporter.advance(sum(not response.error for response in responses))
        if responses:
            self.losses = 0

    def _replace(self, worker: _Worker, error: Exception) -> None:
        """Give the rest of a lost worker's shard to another worker.

        Raises:
            UserError: Every worker was lost before it answered anything.
        """
        # Until Ray notices that machines are dead, it places workers on them: one by one on each, and none is at fault.
        self.losses += not all(text in str(error) for text in _NEVER_RAN)
        self.workers.remove(worker)
        if worker.shard is not None:
            self.queue.give_back(worker.shard)
        reason = _reason(error)
        if self.losses == _HOPELESS:
            raise UserError(
                f"{_HOPELESS} Ray workers in a row were lost without a response: {reason}; each may need more memory, "
                "so use fewer --workers or a smaller --batch-size (the same command continues from here)"
            )
        self.reporter.message(f"a Ray worker was lost, and another continues its work: {reason}")
        idle_workers = [worker for worker in self.workers if worker.waits is None]
        if idle_workers and self.queue.pending:
            self._assign(idle_workers[0])
        elif self.queue.pending:
            self._hire()


def _reason(error: Exception) -> str:
    """Return why a worker was lost: the first sentence after the indented facts of Ray's error, or its first line."""
    first_line, *other_lines = (str(error) or type(error).__name__).splitlines()
    sentence = next((line for line in other_lines if line and not line.startswith("\t")), first_line)
    return sentence.split(". ")[0].rstrip(".")
