"""What a run lacks, and how long that takes: some contexts on the real model, scaled up."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import nn

from kvbench.engine.clock import now
from kvbench.progress import Silent
from kvbench.runs.answers import Prompt, key_of
from kvbench.runs.executors.base import answer, worker_of
from kvbench.runs.grid import Grid
from kvbench.runs.index import Key
from kvbench.runs.planning import Job, Say, Stage
from kvbench.runs.prompts import Prompts
from kvbench.runs.store import RunStore
from kvbench.runs.worker import loaded_model

_SECONDS = 10.0
"""Seconds of measuring after which no other task is measured, and no more contexts of a task than
they allow."""

_JOBS = 3
"""Tasks that are measured at most: their answers differ in length."""


class Missing(NamedTuple):
    """What a job lacks.

    Attributes:
        job: The job.
        prompts: Its prompts that lack a response of some cell.
        responses: The responses that it lacks.
        steps: The tokens of these responses if none ends before its limit.
    """

    job: Job
    prompts: Prompts
    responses: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of the contexts that are prefilled."""
        return sum({hash(p.context_ids): len(p.context_ids) for p in self.prompts}.values())


def missing_of(stage: Stage, done: Container[Key]) -> list[Missing]:
    """What the jobs of a stage lack; those that lack nothing are left out.

    Args:
        stage: A model with its jobs.
        done: Keys of the responses that exist.
    """
    found = []
    for job in stage.jobs:
        places, total, steps = [], 0, 0
        for place, prompt in enumerate(job.prompts):
            if count := sum(key_of(cell, prompt) not in done for cell in job.cells):
                places.append(place)
                total, steps = total + count, steps + prompt.limit * count
        if total:
            found.append(Missing(job, job.prompts.part(places), total, steps))
    return found


@dataclass(frozen=True)
class _Measured:
    """What some contexts took.

    Attributes:
        tokens: Tokens of the contexts.
        steps: Tokens of the responses if none had ended before its limit.
        prefill: Seconds of the prefills.
        rest: Seconds of all else.
        rows: Rows of a batch.
    """

    tokens: int = 0
    steps: int = 0
    prefill: float = 0.0
    rest: float = 0.0
    rows: int = 1

    @property
    def seconds(self) -> float:
        """Seconds of all."""
        return self.prefill + self.rest

    def __add__(self, other: _Measured) -> _Measured:
        return _Measured(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.prefill + other.prefill,
            self.rest + other.rest,
            other.rows,
        )


@dataclass(frozen=True)
class _Meter:
    """Answers contexts as a run does, and measures it."""

    model: nn.Module
    stage: Stage
    grid: Grid

    def measure(self, job: Job, contexts: Sequence[list[Prompt]]) -> _Measured:
        """Answer contexts of a job for all of its cells."""
        prompts = [prompt for context in contexts for prompt in context]
        with tempfile.TemporaryDirectory() as folder, RunStore(folder) as scratch:
            worker = worker_of(self.model, self.stage, self.grid, scratch, Silent())
            start = now(worker.device)
            answer(worker, prompts, job.cells)
            seconds = now(worker.device) - start
            prefills: dict[str, float] = {}  # that of a context stands in all of its responses
            for response in scratch.responses():
                known = prefills.get(response.context_id, 0.0)
                prefills[response.context_id] = max(known, response.prefill_s)
        prefill = min(seconds, sum(prefills.values()))
        return _Measured(
            tokens=sum(len(context[0].context_ids) for context in contexts),
            steps=len(job.cells) * sum(prompt.limit for prompt in prompts),
            prefill=prefill,
            rest=seconds - prefill,
            rows=worker.batching.rows,
        )


def estimate(stage: Stage, grid: Grid, missing: Sequence[Missing], say: Say) -> float:
    """Seconds for what a stage lacks.

    Contexts are answered as the run answers them: so many of a task that its batches are full, if
    time allows. A single context would leave most rows of its batches empty, and answers that end
    early would count as if they went to their limit.

    Args:
        stage: A model with its jobs.
        grid: How to run it.
        missing: What it lacks, of one job at least.
        say: Told that the model is loaded.
    """
    chosen = [missing[i] for i in _spread(len(missing), _JOBS)]
    with loaded_model(stage, grid, say) as model:
        meter = _Meter(model, stage, grid)
        first = next(_contexts(chosen[0]))
        warm = meter.measure(chosen[0].job, [chosen[0].prompts[first]])
        found = _Measured()
        for part in chosen:
            contexts = list(_contexts(part))
            full = math.ceil(2 * warm.rows / len(part.job.cells))
            count = max(1, min(full, len(contexts) // 4, int(_SECONDS / warm.seconds)))
            some = [part.prompts[contexts[i]] for i in _spread(len(contexts), count)]
            found += meter.measure(part.job, some)
            if found.seconds > _SECONDS:
                break
    tokens, steps = sum(m.tokens for m in missing), sum(m.steps for m in missing)
    return found.prefill * tokens / max(1, found.tokens) + found.rest * steps / max(1, found.steps)


def _contexts(part: Missing) -> Iterator[slice]:
    """Where the prompts of each context are; a dialogue has one."""
    end = 0
    for _, prompts in groupby(part.prompts, key=lambda prompt: prompt.request.context_id):
        start, end = end, end + sum(1 for _ in prompts)
        yield slice(start, end)


def _spread(length: int, count: int) -> list[int]:
    """At most `count` places among `length`, as far from each other as possible."""
    count = min(length, count)
    return [(2 * i + 1) * length // (2 * count) for i in range(count)]
