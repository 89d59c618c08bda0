"""Shards cover what is missing exactly once, and workers change jobs only if they must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.runs.answers import key_of
from kvbench.runs.executors.shards import Queue, Shard, shards_of
from kvbench.runs.index import Key
from kvbench.runs.planning import JobName, Stage, plan
from tests.kvbench.runs.small import small_grid


@pytest.fixture(scope="module")
def stage() -> Stage:
    (stage,) = plan(small_grid(Path("unused"), samples=7), lambda text: None).stages
    return stage


def keys_of(stage: Stage) -> list[tuple[str, str, int, int]]:
    return [key_of(cell, prompt) for j in stage.jobs for cell in j.cells for prompt in j.prompts]


def missing(stage: Stage, shard: Shard, done: Container[Key] = frozenset()) -> frozenset[Key]:
    (job,) = [job for job in stage.jobs if JobName.of(stage, job) == shard.job]
    return shard.missing(job, done)


@pytest.mark.parametrize("workers", [1, 2, 5, 100])
@pytest.mark.parametrize("step", [2, 3, 5])
def test_every_missing_response_is_in_one_shard(stage: Stage, workers: int, step: int) -> None:
    keys = keys_of(stage)
    done = set(keys[::step])
    shards = shards_of([stage], done, workers)
    held = [key for shard in shards for key in missing(stage, shard, done)]
    assert sorted(held) == sorted(set(keys) - done)
    assert all(missing(stage, shard, done) for shard in shards)


def test_contexts_that_are_done_are_in_no_shard_of_their_own(stage: Stage) -> None:
    job = stage.jobs[0]
    done = {key_of(cell, prompt) for cell in job.cells for prompt in job.prompts[2:5]}
    shards = shards_of([stage], done, 100)
    assert [list(s.prompts) for s in shards if s.job == JobName.of(stage, job)] == [
        [0], [1], [5], [6],
    ]  # fmt: skip


def test_a_context_is_never_divided(stage: Stage) -> None:
    shards = shards_of([stage], set(), 100)
    contexts = {(s.job, sample) for s in shards for _, sample, _, _ in missing(stage, s)}
    assert len(shards) == len(contexts) == 14


def test_there_is_work_for_every_worker_and_batches_are_full(stage: Stage) -> None:
    assert len(shards_of([stage], set(), 1)) == 2, "one for each job"
    assert len(shards_of([stage], set(), 4)) >= 4
    job = replace(stage.jobs[0], prompts=[*stage.jobs[0].prompts] * 100)
    job = replace(job, prompts=[replace(p, repeat=i) for i, p in enumerate(job.prompts)])
    many = replace(stage, jobs=[job])
    sizes = [len(missing(many, s)) for s in shards_of([many], set(), 4)]
    assert len(sizes) == 16 and min(sizes) >= 64


def test_policies_that_evict_while_decoding_fill_batches_of_their_own() -> None:
    grid = small_grid(Path("unused"), samples=100, moment="decode", budget="16,32")
    (stage,) = plan(grid, lambda text: None).stages
    (job,) = stage.jobs[:1]
    alone = max(Counter(str(cell.policy) for cell in job.cells).values())
    assert alone < len(job.cells)
    shards = shards_of([replace(stage, jobs=[job])], set(), 2)
    assert len(shards) > 2 and min(len(s.prompts) for s in shards[:-1]) * alone >= 64


def test_nothing_missing_needs_no_shard(stage: Stage) -> None:
    assert shards_of([stage], set(keys_of(stage)), 4) == []


A, B, OTHER = JobName("m", "a", 256), JobName("m", "b", 256), JobName("n", "a", 256)


def shard(job: JobName, number: int) -> Shard:
    return Shard(job, range(number, number + 1))


def test_workers_keep_their_job_and_spread_over_the_others() -> None:
    queue = Queue([shard(A, 0), shard(A, 1), shard(B, 2), shard(B, 3), shard(OTHER, 4)])
    assert [queue.take(None).job for _ in range(2)] == [A, B]
    assert queue.take(B) == shard(B, 3)
    assert queue.take(B) == shard(A, 1), "the same model is loaded already"
    assert queue.take(A).job == OTHER
    assert not queue.pending


def test_what_a_lost_worker_has_left_comes_first(stage: Stage) -> None:
    queue = Queue(shards_of([stage], set(), 100))
    count, first = len(queue.pending), queue.take(None)
    lost = missing(stage, first)
    done = set(sorted(lost)[1:])
    queue.give_back(first)
    assert len(queue.pending) == count and not queue.taken
    assert queue.take(first.job) == first
    assert missing(stage, first, done) == lost - done
    queue.finish(first)
    assert len(queue.pending) == count - 1 and not queue.taken
