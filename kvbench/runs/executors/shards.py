"""How the missing responses of a run are cut into pieces that workers take."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from kvbench.runs.answers import key_of
from kvbench.runs.index import Key
from kvbench.runs.planning import Job, JobName, Stage

_FULL = 64
"""Responses of a shard that keep a worker's batches full; more shards balance the load better."""

_PER_WORKER = 4
"""Shards for each worker, if they are full: the last ones end at about the same time."""


@dataclass(frozen=True)
class Shard:
    """Responses of one job that one worker generates.

    The contexts of a job are never divided: each is prefilled once for all cells. Which contexts
    share a shard depends on what is missing, and changes no response: a worker always plans the
    whole job, so that the room and the width of its batches are those of a run in one process.

    Attributes:
        job: Whose responses they are.
        keys: Their keys.
    """

    job: JobName
    keys: frozenset[Key]

    def without(self, done: Container[Key]) -> Shard:
        """What is left of the shard."""
        return replace(self, keys=frozenset(key for key in self.keys if key not in done))


def shards_of(stages: Sequence[Stage], done: Container[Key], workers: int) -> list[Shard]:
    """Cut the missing responses into shards, in the order of the plan.

    Args:
        stages: The models with their jobs.
        done: Keys of the responses that exist.
        workers: How many workers there are at most.
    """
    jobs = [
        (JobName.of(stage, job), contexts)
        for stage in stages
        for job in stage.jobs
        if (contexts := list(_missing(job, done)))
    ]
    total = sum(len(keys) for _, contexts in jobs for keys in contexts)
    size = min(max(total / (workers * _PER_WORKER), _FULL), total / workers)
    return [
        Shard(name, frozenset(keys)) for name, contexts in jobs for keys in _packed(contexts, size)
    ]


def _missing(job: Job, done: Container[Key]) -> Iterator[list[Key]]:
    """The missing keys of each context; a dialogue has one context."""
    for _, prompts in groupby(job.prompts, key=lambda prompt: prompt.request.context_id):
        keys = [key_of(cell, prompt) for prompt in prompts for cell in job.cells]
        keys = [key for key in keys if key not in done]
        if keys:
            yield keys


def _packed(contexts: Sequence[list[Key]], size: float) -> Iterator[list[Key]]:
    """Join contexts until they have `size` keys."""
    pack: list[Key] = []
    for keys in contexts:
        pack += keys
        if len(pack) >= size:
            yield pack
            pack = []
    if pack:
        yield pack


@dataclass
class Queue:
    """The shards that nobody works on, and who takes which.

    Args:
        pending: The shards.
    """

    pending: list[Shard]
    taken: list[Shard] = field(default_factory=list)

    def take(self, last: JobName | None) -> Shard:
        """Take a shard: of the job that the worker has planned, else of one that nobody works on.

        A worker plans a job, and loads a model, only if it must.

        Args:
            last: The job of the worker's previous shard.
        """
        elsewhere = {shard.job for shard in self.taken}

        def cost(shard: Shard) -> tuple[bool, bool, bool]:
            model = None if last is None else last.model
            return (shard.job != last, shard.job.model != model, shard.job in elsewhere)

        shard = min(self.pending, key=cost)
        self.pending.remove(shard)
        self.taken.append(shard)
        return shard

    def finish(self, shard: Shard) -> None:
        """A shard is done."""
        self.taken.remove(shard)

    def give_back(self, shard: Shard, done: Container[Key]) -> None:
        """What a lost worker has left of a shard is the first to be taken again."""
        self.taken.remove(shard)
        left = shard.without(done)
        if left.keys:
            self.pending.insert(0, left)
