"""Partition of a run's missing responses into shards for workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from kvbench.engine.eviction_state import goes_on
from kvbench.runs.answers import key_of
from kvbench.runs.index import Key
from kvbench.runs.planning import Job, JobName, Stage

_FULL = 64
"""Responses that are decoded together and keep a worker's batches full; more shards balance the load better."""

_PER_WORKER = 4
"""Full shards per worker, so that the last ones end at about the same time."""


@dataclass(frozen=True)
class Shard:
    """Prompts of one job that one worker answers for all cells.

    The contexts of a job are never divided: each is prefilled once for all cells. How contexts are grouped depends on
    what is missing but changes no response, because a worker always plans the whole job and thus sizes its batches as a
    run in one process does. A shard does not hold the keys of its responses: those of a large grid take gigabytes.

    Attributes:
        job: The job of the prompts.
        prompts: Their indices among the prompts of the job.
    """

    job: JobName
    prompts: range

    def missing(self, job: Job, done_keys: Container[Key]) -> frozenset[Key]:
        """Return the keys of its missing responses.

        Args:
            job: The job that it names.
            done_keys: Keys of the existing responses.
        """
        return frozenset(_missing(job, self.prompts, done_keys))


def shards_of(stages: Sequence[Stage], done_keys: Container[Key], worker_count: int) -> list[Shard]:
    """Partition the missing responses into shards, in the order of the plan.

    Args:
        stages: The models with their jobs.
        done_keys: Keys of the existing responses.
        worker_count: Maximum number of workers.
    """
    job_contexts = [
        (job, JobName.of(stage, job), contexts)
        for stage in stages
        for job in stage.jobs
        if (contexts := list(_contexts(job, done_keys)))
    ]
    total_count = sum(response_count for *_, contexts in job_contexts for _, response_count in contexts)
    balanced_size, largest_size = total_count / (worker_count * _PER_WORKER), total_count / worker_count
    return [
        Shard(job_name, prompts)
        for job, job_name, contexts in job_contexts
        for prompts in _packed(contexts, min(max(balanced_size, _full(job)), largest_size))
    ]


def _full(job: Job) -> float:
    """Return the responses that fill the batches; policies that evict while decoding have batches of their own."""
    together = Counter(
        str(cell.policy) if cell.moment in ("decode", "turns") and goes_on(cell.policy, cell.moment) else ""
        for cell in job.cells
    )
    return _FULL * len(job.cells) / max(together.values())


def _contexts(job: Job, done_keys: Container[Key]) -> Iterator[tuple[range, int]]:
    """Yield the prompt range and missing count of each incomplete context; a dialogue has one."""
    start_index = 0
    for _, group in groupby(job.prompts, key=lambda prompt: prompt.request.context_id):
        prompts = range(start_index, start_index + sum(1 for _ in group))
        start_index = prompts.stop
        if missing_count := sum(1 for _ in _missing(job, prompts, done_keys)):
            yield prompts, missing_count


def _missing(job: Job, prompts: range, done_keys: Container[Key]) -> Iterator[Key]:
    keys = (key_of(cell, job.prompts[prompt_index]) for prompt_index in prompts for cell in job.cells)
    return (key for key in keys if key not in done_keys)


def _packed(contexts: Sequence[tuple[range, int]], shard_size: float) -> Iterator[range]:
    """Join contexts until they lack `shard_size` responses; those in between are complete."""
    start_index, packed_count = -1, 0
    for prompts, response_count in contexts:
        start_index, packed_count = prompts.start if packed_count == 0 else start_index, packed_count + response_count
        if packed_count >= shard_size:
            yield range(start_index, prompts.stop)
            packed_count = 0
    if packed_count:
        yield range(start_index, contexts[-1][0].stop)


@dataclass
class Queue:
    """The unassigned shards, and their assignment to workers."""

    pending: list[Shard]
    taken: list[Shard] = field(default_factory=list)

    def take(self, last_job: JobName | None) -> Shard:
        """Take a shard, preferably of the worker's planned job, else of a job without workers.

        A worker thus plans a job, and loads a model, only if necessary.

        Args:
            last_job: The job of the worker's previous shard.
        """
        taken_jobs = {shard.job for shard in self.taken}

        def cost(shard: Shard) -> tuple[bool, bool, bool]:
            last_model = None if last_job is None else last_job.model
            return (shard.job != last_job, shard.job.model != last_model, shard.job in taken_jobs)

        shard = min(self.pending, key=cost)
        self.pending.remove(shard)
        self.taken.append(shard)
        return shard

    def finish(self, shard: Shard) -> None:
        """Mark a shard as done."""
        self.taken.remove(shard)

    def give_back(self, shard: Shard) -> None:
        """Return a lost worker's shard to the front of the queue."""
        self.taken.remove(shard)
        self.pending.insert(0, shard)
