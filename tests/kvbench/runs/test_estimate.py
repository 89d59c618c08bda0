"""What a run lacks is counted, and contexts that fill its batches are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.runs import estimate as estimates
from kvbench.runs.answers import key_of
from kvbench.runs.estimate import estimate
from kvbench.runs.planning import Stage, plan
from kvbench.runs.work import missing_of
from tests.kvbench.runs.small import small_grid

GRID = small_grid(Path("unused"), samples=40, cache_memory=None)


@pytest.fixture(scope="module")
def stage() -> Stage:
    (stage,) = plan(GRID, lambda text: None).stages
    return stage


def test_what_is_missing_is_counted(stage: Stage) -> None:
    first, second = stage.jobs
    everything = missing_of(stage, set(), fidelity=False)
    assert [m.responses for m in everything] == [3 * 40, 3 * 40]
    assert everything[0].steps == 3 * sum(prompt.limit for prompt in first.prompts)
    assert everything[0].tokens == sum(len(prompt.context_ids) for prompt in first.prompts)
    done = {key_of(cell, p) for cell in first.cells for p in first.prompts}
    done |= {key_of(second.cells[0], p) for p in second.prompts}
    done |= {key_of(cell, second.prompts[5]) for cell in second.cells}
    (left,) = missing_of(stage, done, fidelity=False)
    assert left.job is second and left.responses == 2 * 39
    assert [*left.prompts] == [p for i, p in enumerate(second.prompts) if i != 5]
    assert missing_of(stage, done | {key_of(c, p) for c in second.cells for p in left.prompts}, fidelity=False) == ([])


def test_batches_are_filled_and_the_sum_is_scaled(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    class Meter:
        """Takes 10 µs for a token of a context, and 1 µs for one of a response."""

        def __init__(self, *_: Any) -> None: ...

        def measure(self, job: Any, contexts: Any) -> Any:
            seen.append((job.task.name, len(contexts)))
            prompts = [prompt for context in contexts for prompt in context]
            tokens = sum(len(prompt.context_ids) for prompt in prompts)
            steps = len(job.cells) * sum(prompt.limit for prompt in prompts)
            return estimates._Measured(tokens, steps, 1e-5 * tokens, 1e-6 * steps, rows=12)

    monkeypatch.setattr(estimates, "_Meter", Meter)
    missing = missing_of(stage, set(), fidelity=False)
    found = estimate(stage, GRID, missing, lambda text: None)
    names = [job.task.name for job in stage.jobs]
    assert seen == [(names[0], 1), (names[0], 8), (names[1], 8)], "twice the rows, of three cells"
    tokens, steps = sum(m.tokens for m in missing), sum(m.steps for m in missing)
    assert found == pytest.approx(1e-5 * tokens + 1e-6 * steps)


def test_long_answers_are_cut_and_the_sum_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = small_grid(Path("unused"), samples=8, max_new_tokens=2000)
    (stage,) = plan(grid, lambda text: None).stages
    seen: list[int] = []

    class Meter:
        """Takes 10 ms for a token of a response."""

        def __init__(self, *_: Any) -> None: ...

        def measure(self, job: Any, contexts: Any) -> Any:
            prompts = [prompt for context in contexts for prompt in context]
            seen.extend(prompt.limit for prompt in prompts)
            steps = len(job.cells) * sum(prompt.limit for prompt in prompts)
            return estimates._Measured(1, steps, 0.0, 1e-2 * steps)

    monkeypatch.setattr(estimates, "_Meter", Meter)
    found = estimate(stage, grid, missing_of(stage, set(), fidelity=False), lambda text: None)
    assert seen[0] == 32 and seen[1] == 333, "of three cells, in ten seconds"
    assert found == pytest.approx(1e-2 * 2 * 8 * 3 * 2000)


def test_a_prefill_is_measured_apart_from_all_else(stage: Stage) -> None:
    with estimates.loaded_model(stage, GRID, lambda text: None) as model:
        job = stage.jobs[0]
        measured = estimates._Meter(model, stage, GRID).measure(job, [job.prompts[:1]])
    assert measured.steps == 3 * job.prompts[0].limit
    assert measured.tokens == len(job.prompts[0].context_ids)
    assert 0 < measured.prefill < measured.seconds


@pytest.mark.parametrize(("length", "count", "places"), [(10, 3, [1, 5, 8]), (2, 3, [0, 1]), (1, 1, [0])])
def test_places_are_spread(length: int, count: int, places: list[int]) -> None:
    assert estimates._spread(length, count) == places
