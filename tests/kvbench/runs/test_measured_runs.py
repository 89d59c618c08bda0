"""Runs of tasks that measure texts: extended, resumed, estimated and refused like those of other tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.benchmark import Benchmark
from kvbench.errors import UserError
from kvbench.harness.protocol import Continuation, LoadedTask, MetricScores, TaskSettings
from kvbench.runs.estimate import estimate
from kvbench.runs.grid import Grid
from kvbench.runs.planning import HARNESSES, plan
from kvbench.runs.runner import execute
from kvbench.runs.store import RunStore
from kvbench.runs.work import missing_of

from .small import small_grid, stored
from .test_continuations import FACTS, LETTERS, TEXTS
from .test_sliding import request

KINDS = ("choices", "whole", "mixed")


class Loaded(LoadedTask):
    def score_metrics(self, responses: Mapping[Any, str], marks: Sequence[Any] | None = None) -> list[MetricScores]:
        return [MetricScores("none", "", True, dict.fromkeys(responses, 0.0), 0.0)]


class Harness:
    """Requests that measure continuations, whole texts, or continuations beside answers."""

    name = "made-up"

    def load(self, task: str, settings: TaskSettings, benchmark: Benchmark | None = None) -> LoadedTask:
        requests = []
        for n in range(settings.samples):
            plain = replace(request(n, 3), task=task, context=f"{FACTS}the key is {'red' if n % 2 else 'black'} . ")
            continuations: tuple[Continuation, ...] = (LETTERS, TEXTS)[n % 2]
            if task == "whole":
                plain = replace(plain, rolling=True)
            elif task == "choices" or n % 2:
                plain = replace(plain, question=continuations[0].question, continuations=continuations)
            else:
                plain = replace(plain, question=" what is the key ?")
            requests.append(plain)
        return Loaded(task, "made-up", "1", "0" * 16, "none", True, 0.0, 0, tuple(requests))


@pytest.fixture(autouse=True, scope="module")
def tasks() -> Iterator[None]:
    bench = Benchmark("made-up", KINDS, list, Path(), harness="made-up", sized=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HARNESSES, "made-up", Harness())
        patch.setattr(Grid, "leaves", lambda grid: [(task, bench) for task in grid.tasks])
        yield


def grid(out: Path, task: str, **changes: Any) -> Grid:
    late = {"moment": "decode,chunked:16"} if task == "whole" else {"moment": "context,question,decode"}
    return small_grid(out, **{"task": task, "cache_memory": None, **late, **changes})


@pytest.mark.parametrize("task", KINDS)
def test_an_extended_run_equals_an_uninterrupted_one(tmp_path: Path, task: str) -> None:
    execute(grid(tmp_path / "one", task, samples=2))
    first = stored(tmp_path / "one")
    execute(grid(tmp_path / "one", task, samples=5))
    execute(grid(tmp_path / "other", task, samples=5))
    extended = stored(tmp_path / "one")
    assert len(first) < len(extended) and first.items() <= extended.items()
    assert extended == stored(tmp_path / "other")
    with RunStore(tmp_path / "one") as store:
        measured = [response for response in store.responses() if response.stop == "given"]
    assert measured and all(json.loads(response.response)["tokens"] for response in measured)
    assert all(response.kv_bytes_full and response.budget_entries for response in measured)


@pytest.mark.parametrize("task", ["choices", "whole"])
def test_their_time_is_estimated(tmp_path: Path, task: str) -> None:
    asked = grid(tmp_path, task, samples=8)
    (stage,) = plan(asked, print).stages
    (missing,) = missing_of(stage, set(), fidelity=False)
    assert missing.steps == len(stage.jobs[0].cells) * sum(
        len(branch.answer_ids) for prompt in stage.jobs[0].prompts for branch in prompt.branches
    )
    assert estimate(stage, asked, [missing], print) > 0


def test_a_whole_text_has_nothing_to_compress_before_it(tmp_path: Path) -> None:
    message = (
        "whole measures whole texts, so there is nothing to compress before them at moment context; "
        r"use --moment decode \(budget in tokens\) or chunked"
    )
    with pytest.raises(UserError, match=message):
        plan(grid(tmp_path, "whole", moment="context,decode"), print)
    plan(grid(tmp_path, "whole", moment="context", policy="full"), print)
    with pytest.raises(UserError, match=r"use a budget in tokens such as 128 instead of 0\.3"):
        plan(grid(tmp_path, "whole", moment="decode", budget="0.3,8"), print)


@pytest.mark.parametrize(("task", "recorded"), [("choices", False), ("mixed", True)])
def test_a_limit_counts_where_something_is_answered(tmp_path: Path, task: str, recorded: bool) -> None:
    hashes = {
        limit: plan(grid(tmp_path, task, max_new_tokens=limit), print).stages[0].jobs[0].cells[0].cell
        for limit in (2, 3)
    }
    assert (hashes[2] != hashes[3]) == recorded


def test_a_choice_that_adds_no_token_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.LETTERS", (Continuation("what ?", ""),))
    with pytest.raises(UserError, match="choices, s0: the continuation '' adds no tokens to its prompt"):
        plan(grid(tmp_path, "choices"), print)
