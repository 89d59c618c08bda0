"""Shards cover what is missing exactly once, and workers change jobs only if they must."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.runs.answers import key_of
from kvbench.runs.executors.shards import Queue, Shard, shards_of
from kvbench.runs.planning import JobName, Stage, plan
from tests.kvbench.runs.small import small_grid


@pytest.fixture(scope="module")
def stage() -> Stage:
    (stage,) = plan(small_grid(Path("unused"), samples=7), lambda text: None).stages
    return stage


def keys_of(stage: Stage) -> list[tuple[str, str, int, int]]:
    return [key_of(cell, prompt) for j in stage.jobs for cell in j.cells for prompt in j.prompts]


@pytest.mark.parametrize("workers", [1, 2, 5, 100])
def test_every_missing_response_is_in_one_shard(stage: Stage, workers: int) -> None:
    keys = keys_of(stage)
    done = set(keys[::3])
    shards = shards_of([stage], done, workers)
    held = [key for shard in shards for key in shard.keys]
    assert sorted(held) == sorted(set(keys) - done)
    assert all(shards)


def test_a_context_is_never_divided(stage: Stage) -> None:
    shards = shards_of([stage], set(), 100)
    contexts = {(s.job, sample) for s in shards for _, sample, _, _ in s.keys}
    assert len(shards) == len(contexts) == 14


def test_there_is_work_for_every_worker_and_batches_are_full(stage: Stage) -> None:
    assert len(shards_of([stage], set(), 1)) == 2, "one for each job"
    assert len(shards_of([stage], set(), 4)) >= 4
    job = replace(stage.jobs[0], prompts=stage.jobs[0].prompts * 100)
    job = replace(job, prompts=[replace(p, repeat=i) for i, p in enumerate(job.prompts)])
    sizes = [len(s.keys) for s in shards_of([replace(stage, jobs=[job])], set(), 4)]
    assert len(sizes) == 16 and min(sizes) >= 64


def test_nothing_missing_needs_no_shard(stage: Stage) -> None:
    assert shards_of([stage], set(keys_of(stage)), 4) == []


A, B, OTHER = JobName("m", "a", 256), JobName("m", "b", 256), JobName("n", "a", 256)


def shard(job: JobName, number: int) -> Shard:
    return Shard(job, frozenset({("cell", f"s{number}", 0, 0), ("cell", f"s{number}", 1, 0)}))


def test_workers_keep_their_job_and_spread_over_the_others() -> None:
    queue = Queue([shard(A, 0), shard(A, 1), shard(B, 2), shard(B, 3), shard(OTHER, 4)])
    assert [queue.take(None).job for _ in range(2)] == [A, B]
    assert queue.take(B) == shard(B, 3)
    assert queue.take(B) == shard(A, 1), "the same model is loaded already"
    assert queue.take(A).job == OTHER
    assert not queue.pending


def test_what_a_lost_worker_has_left_comes_first() -> None:
    queue = Queue([shard(A, 0), shard(A, 1)])
    first = queue.take(None)
    kept = ("cell", "s0", 1, 0)
    queue.give_back(first, {("cell", "s0", 0, 0)})
    assert queue.pending == [Shard(A, frozenset({kept})), shard(A, 1)]
    again = queue.take(None)
    queue.give_back(again, {kept})
    assert queue.pending == [shard(A, 1)] and not queue.taken
