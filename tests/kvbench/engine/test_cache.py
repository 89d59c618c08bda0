"""The cache of many sequences: stacked, taken apart, forked, evicted from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbench
from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.prefix import Prefix, Request, engine, forward

from .conftest import batch, build

SPECS = [("random:allocate=global", 0.3, 40), ("snapkv:window=4", 9, 23), ("full", "full", 31)]


def caches(model: Any) -> list[RaggedCache]:
    out = []
    for i, (spec, budget, columns) in enumerate(SPECS):
        policy = kvbench.policy(spec)
        prefix = Prefix(model, policy.needs)
        prefix.extend(batch(1, columns, [0], seed=i)[0])
        wish = Request(policy, Budget.parse(budget), "context", 0)
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
        part = together.take([2, 0])
        for i in range(6):
            new = tokens[:, i : i + 1]
            alone = torch.cat([forward(model, c, new[r : r + 1]) for r, c in enumerate(single)])
            assert torch.allclose(forward(model, together, new), alone, atol=1e-4)
            assert torch.allclose(forward(model, part, new[[2, 0]]), alone[[2, 0]], atol=1e-4)
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


@torch.no_grad()
def test_evict_cuts_the_rows_it_is_told() -> None:
    model = build("llama")
    with engine(model):
        cache = RaggedCache.stack(caches(model)[::2])
        before, live = cache.kept(), [layer.padded_rows()[1] for layer in cache.ragged]
        allocated = cache.allocated_bytes()
        cache.evict([x & (torch.arange(x.shape[-1]) % 2 == 0) for x in live], rows=[1])
    for a, b in zip(before, cache.kept(), strict=True):
        assert a is not None and b is not None
        assert torch.equal(a[0], b[0])
        for old, new in zip(a[1], b[1], strict=True):
            assert torch.equal(new.nonzero(), old.nonzero()[::2])
    assert cache.allocated_bytes() < allocated
