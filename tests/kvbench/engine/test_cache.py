"""The cache of many sequences: stacked, taken apart, forked, evicted from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbench
from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward
from kvbench.engine.prefix import Compression, Prefix

from .conftest import batch, build

SPECS = [("random:allocate=global", 0.3, 40), ("snapkv:window=4", 9, 23), ("full", "full", 31)]


def caches(model: Any) -> list[RaggedCache]:
    out = []
    for i, (spec, budget, columns) in enumerate(SPECS):
        policy = kvbench.policy(spec)
        prefix = Prefix(model, policy.needs)
        prefix.extend(batch(1, columns, [0], seed=i)[0])
        wish = Compression(policy, Budget.parse(budget), "context", 0)
        out += prefix.compress([wish], reserve=2)
    return out


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_rows_of_a_stack_answer_like_the_single_caches(name: str) -> None:
    model = build(name)
    tokens, _ = batch(3, 6, [0, 0, 0], seed=9)
    with engine(model):
        single = caches(model)
        together = RaggedCache.stack([c.fork() for c in single])
        for i in range(6):
            new = tokens[:, i : i + 1]
            alone = torch.cat([forward(model, c, new[r : r + 1]) for r, c in enumerate(single)])
            assert torch.allclose(forward(model, together, new), alone, atol=1e-4)
    assert [together.live_entries(r) for r in range(3)] == [c.live_entries() for c in single]
    assert together.held_entries == [c.held_entries[0] for c in single if c.held_entries]


@torch.no_grad()
def test_a_fork_goes_on_alone() -> None:
    model = build("llama")
    tokens, _ = batch(1, 3, [0], seed=9)
    with engine(model):
        first = caches(model)[0]
        second = first.fork()
        before = forward(model, second.fork(), tokens)
        forward(model, first, tokens.flip(1))
        assert torch.equal(forward(model, second, tokens), before)
