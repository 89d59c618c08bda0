"""Estimate of the time that missing responses take, from a few contexts on the real model."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from kvbench.engine.threads import now
from kvbench.progress import Silent
from kvbench.runs.answers import Prompt
from kvbench.runs.executors.base import answer, worker_of
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, Say, Stage
from kvbench.runs.store import RunStore
from kvbench.runs.work import Missing
from kvbench.runs.worker import loaded_model

_SECONDS = 10.0
"""Time limit in seconds: no further task, and no further contexts of a task, are measured beyond it."""

_WARM_UP = 32
"""Tokens of the answers to the first context. If whole answers would exceed the time limit, others are cut as well."""

_JOBS = 3
"""Maximum number of tasks to measure; several, because their answers differ in length."""


@dataclass(frozen=True)
class _Measured:
    """Measured cost of some contexts.

    Attributes:
        tokens: Tokens of the contexts.
        steps: Tokens of the responses if none had ended before its limit.
        prefill: Prefill time in seconds.
        rest: All other time in seconds.
        rows: Rows of a batch.
    """

    tokens: int = 0
    steps: int = 0
    prefill: float = 0.0
    rest: float = 0.0
    rows: int = 1

    @property
    def seconds(self) -> float:
        """Return the total time in seconds."""
        return self.prefill + self.rest

    def __add__(self, measured: _Measured) -> _Measured:
        return _Measured(
            self.tokens + measured.tokens,
            self.steps + measured.steps,
            self.prefill + measured.prefill,
            self.rest + measured.rest,
            measured.rows,
        )


@dataclass(frozen=True)
class _Meter:
    """Measures the time to answer contexts as a run does."""

    model: nn.Module
    stage: Stage
    grid: Grid

    def measure(self, job: Job, contexts: Sequence[list[Prompt]]) -> _Measured:
        """Answer contexts of a job for all of its cells."""
        prompts = [prompt for context in contexts for prompt in context]
        with tempfile.TemporaryDirectory() as folder, RunStore(folder) as scratch:
            worker = worker_of(self.model, self.stage, self.grid, scratch, Silent())
            start_time = now(worker.device)
            answer(worker, prompts, job.cells)
            seconds = now(worker.device) - start_time
            prefills: dict[str, float] = {}  # every response of a context stores its prefill time
            for response in scratch.responses():
                earlier_prefill = prefills.get(response.context_id, 0.0)
                prefills[response.context_id] = max(earlier_prefill, response.prefill_s)
        token_count = sum(len(context[0].context_ids) for context in contexts)
        # Whole texts have no context: their time goes with the measured tokens.
        prefill_time = min(seconds, sum(prefills.values())) if token_count else 0.0
        return _Measured(
            tokens=token_count,
            steps=len(job.cells) * sum(prompt.steps for prompt in prompts),
            prefill=prefill_time,
            rest=seconds - prefill_time,
            rows=worker.batching.rows,
        )


def estimate(stage: Stage, grid: Grid, pending_jobs: Sequence[Missing], notify: Say) -> float:
    """Estimate the seconds needed for the missing responses of a stage.

    Contexts are answered as in the run: enough contexts per task to fill its batches, within the time limit. A single
    context would leave most rows of its batches empty, and answers that end early would count up to their limit.

    Args:
        stage: A model with its jobs.
        pending_jobs: Missing responses of one job or more.
        notify: Receives a message once the model is loaded.
    """
    measured_jobs = [pending_jobs[sample_index] for sample_index in _spread(len(pending_jobs), _JOBS)]
    with loaded_model(stage, grid, notify) as model:
        meter = _Meter(model, stage, grid)
        first_context = measured_jobs[0].prompts[next(_contexts(measured_jobs[0]))]
        warm_up = meter.measure(measured_jobs[0].job, [_cut(first_context, _WARM_UP)])
        answer_limit = max(_WARM_UP, int(_WARM_UP * _SECONDS / warm_up.rest))
        whole_steps = len(measured_jobs[0].job.cells) * sum(
            prompt.steps for prompt in _cut(first_context, answer_limit)
        )
        context_seconds = warm_up.prefill + warm_up.rest * whole_steps / max(1, warm_up.steps)
        measured = _Measured()
        for pending_job in measured_jobs:
            contexts = list(_contexts(pending_job))
            full_batches = math.ceil(2 * warm_up.rows / len(pending_job.job.cells))
            context_count = max(1, min(full_batches, len(contexts) // 4, int(_SECONDS / context_seconds)))
            sampled_contexts = [
                _cut(pending_job.prompts[contexts[sample_index]], answer_limit)
                for sample_index in _spread(len(contexts), context_count)
            ]
            measured += meter.measure(pending_job.job, sampled_contexts)
            if measured.seconds > _SECONDS:
                break
    token_count = sum(pending.tokens for pending in pending_jobs)
    step_count = sum(pending.steps for pending in pending_jobs)
    return measured.prefill * token_count / max(1, measured.tokens) + measured.rest * step_count / max(
        1, measured.steps
    )


def _cut(context: Sequence[Prompt], answer_limit: int) -> list[Prompt]:
    """Return the prompts of a context with answers of at most `answer_limit` tokens."""
    return [
        replace(
            prompt,
            request=replace(prompt.request, max_new_tokens=min(prompt.request.max_new_tokens, answer_limit)),
        )
        for prompt in context
    ]


def _contexts(pending_job: Missing) -> Iterator[slice]:
    """Yield the range of prompts of each context; a dialogue has one."""
    end_index = 0
    for _, prompts in groupby(pending_job.prompts, key=lambda prompt: prompt.request.context_id):
        start_index, end_index = end_index, end_index + sum(1 for _ in prompts)
        yield slice(start_index, end_index)


def _spread(length: int, sample_count: int) -> list[int]:
    """Return at most `sample_count` indices below `length`, as far apart as possible."""
    sample_count = min(length, sample_count)
    return [(2 * sample_index + 1) * length // (2 * sample_count) for sample_index in range(sample_count)]
