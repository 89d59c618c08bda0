"""The end of a prompt that a chunked prefill takes in after its last cut: LocRet's local tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvbench
from kvbench.budget import Budget
from kvbench.engine.eviction_state import tail_of
from kvbench.plugin import Scores, View
from kvbench.runs.contexts import _Contexts
from kvbench.spelling import policy
from kvbench_policies.locret import PredictedLogit

Seen = list[tuple[int, bool, int]]


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, list[Any]]:
    """Length, `final` and `coming` of every cut (first layer), and the caches before decoding."""
    cuts: Seen = []
    caches: list[Any] = []
    score, add = PredictedLogit.score, _Contexts._add

    def watched(self: PredictedLogit, v: View) -> Scores:
        if v.layer == 0:
            cuts.append((int(v.length), v.final, v.coming))
        return score(self, v)

    def kept(self: _Contexts, cell: Any, prompt: Any, cache: Any, *rest: Any) -> None:
        if not cell.is_full:
            caches.append((prompt, cache))
        add(self, cell, prompt, cache, *rest)

    monkeypatch.setattr(PredictedLogit, "score", watched)
    monkeypatch.setattr(_Contexts, "_add", kept)
    return cuts, caches


@pytest.mark.parametrize(("chunk", "budget", "local"), [(90, "0.3", 7), (90, "60", 7), (2000, "0.3", 7), (100, "5", 7)])
def test_it_is_whole_in_every_head_and_counts_in_the_budget(
    chunk: int, budget: str, local: int, spied: tuple[Seen, list[Any]], tmp_path: Path
) -> None:
    cuts, caches = spied
    spec = f"locret:local={local}:stabilizers=5"
    grid = {"policy": spec, "budget": budget, "moment": f"chunked:{chunk}", "task": "vt"}
    run = kvbench.run({**grid, "length": 256, "samples": 1, "out": str(tmp_path / "run")})
    assert set(run.cells.status) == {"ok"}
    ((prompt, cache),) = caches
    tokens = len(prompt.context_ids) + len(prompt.question_ids)
    b = Budget.parse(budget).per_head(tokens)
    tail = min(local, b - 1)
    body = tokens - tail
    ends = [*range(chunk, body, chunk), body]
    due = [end for i, end in enumerate(ends) if end > b or i + 1 == len(ends)]
    assert cuts == [(end, end == body, tail if end == body else 0) for end in due]
    row = run.samples[run.samples.policy != "full"].iloc[0]
    heads = len(cache.ragged) * cache.ragged[0].heads
    assert row.held_entries == row.budget_entries == b * heads
    for layer in cache.ragged:
        for start, length in zip(layer.start, layer.length, strict=True):
            columns = layer.col[start : start + length].tolist()
            assert columns[-tail:] == list(range(body, tokens))


def test_how_long_it_is() -> None:
    locret, other, full = policy("locret:local=7"), policy("snapkv"), policy("full")
    of = lambda p, budget, tokens: tail_of(p, Budget.parse(budget), tokens)  # noqa: E731
    assert of(locret, "0.5", 100) == 7
    assert [of(locret, b, 100) for b in ("1", "2", "7", "8", "99", "100", "300")] == [
        *(0, 1, 6, 7, 7),
        *(0, 0),  # all fits: nothing is cut
    ]
    assert of(other, "0.5", 100) == of(full, "full", 100) == 0


def test_local_tokens_are_not_protected_twice() -> None:
    """What comes after the last cut needs no room among what is cut."""

    class Dense(PredictedLogit):
        def learned(self, v: View) -> torch.Tensor:
            return v.position.float()

    age = torch.arange(9).flip(0)[None, None]

    class Fake:
        final, moment = True, "chunked"
        valid = torch.ones(1, 1, 9, dtype=torch.bool)
        position = 8 - age
        shape = age.shape

        def __init__(self, coming: int) -> None:
            self.coming, self.age = coming, age

    counts = [
        int((Dense(local=4).score(Fake(coming)).protect > 0).sum())  # type: ignore[arg-type]
        for coming in (0, 1, 4, 6)
    ]
    assert counts == [4, 3, 0, 0]
