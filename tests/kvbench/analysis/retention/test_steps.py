"""Eviction maps, against loops, `kvbench.kept`, and `kvbench.attach` token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvbench
from kvbench.analysis.retention import steps
from kvbench.budget import Budget
from kvbench.engine.decide import EvictionStep
from kvbench.engine.draw import row_seeds
from kvbench.engine.driver import engine
from kvbench.engine.prefix import Prefix
from kvbench.progress import Silent
from kvbench.runs.worker import ModelRunner
from kvbench.spelling import policy
from tests.kvbench.analysis.retention import oracles


def pass_by(model: Any, ids: list[int], spec: str, budget: str) -> steps.Trace:
    counted = []
    with engine(model), torch.no_grad():
        runner = ModelRunner(model, Silent())
        trace = steps.trace_decoding(
            runner, ids, policy(spec), Budget.parse(budget), 0, lambda n: counted.extend([1] * n)
        )
    assert len(counted) == len(ids)
    return trace


def looked_at(model: Any, ids: list[int], spec: str, budget: int) -> list[torch.Tensor]:
    """What is held after every token, bool `[L, H, t + 1]`, by `kvbench.attach` alone."""
    found = []
    with torch.no_grad(), kvbench.attach(model, spec, budget, moment="decode") as cache:
        for token in ids:
            model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            kept = [layer for layer in cache.kept() if layer is not None]
            found.append(torch.stack(kept)[:, 0])
    return found


def test_entries_and_maps_follow_from_the_step_that_ends_an_entry() -> None:
    gone = torch.tensor([[3, 1, 4, 3], [4, 4, 4, 4], [0, 1, 2, 3]], dtype=torch.int32)
    maps = steps.held_at_steps(gone, torch.arange(4))
    for head, t, i in torch.cartesian_prod(torch.arange(3), torch.arange(4), torch.arange(4)):
        assert maps[head, t, i] == (i <= t < gone[head, i])
    assert torch.equal(steps.entries(gone), maps.sum(-1))
    assert steps.entries(gone)[0].tolist() == [1, 1, 2, 1]
    assert torch.equal(steps.held_at_steps(gone, torch.tensor([2])), maps[:, 2:3])


@pytest.mark.parametrize("buffer", [0, 5])
def test_a_local_window_slides(model: Any, ids: list[int], buffer: int) -> None:
    trace = pass_by(model, ids, f"local:buffer={buffer}", "12")
    cache: list[int] = []
    gone = [len(ids)] * len(ids)
    for t in range(len(ids)):
        cache.append(t)
        if len(cache) >= 12 + max(1, buffer):
            for i in cache[:-12]:
                gone[i] = t
            cache = cache[-12:]
    assert (trace.eviction_steps == torch.tensor(gone)).all()
    assert trace.budget == 12
    assert int(trace.entries.max()) == 12 + max(1, buffer) - 1
    assert trace.eviction_count == len({t for t in gone if t < len(ids)})


def test_the_first_layer_goes_by_algorithm_1(model: Any, ids: list[int], gates: dict[str, str]) -> None:
    # What enters the first layer does not depend on what was evicted, so its gates say the same.
    spec = gates["trimkv"] + ":buffer=0"
    trimkv = policy(spec)
    with engine(model), torch.no_grad():
        prefix = Prefix(model, trimkv.needs)
        prefix.extend(torch.tensor([ids]))
        cache = prefix.cache
        cut = EvictionStep(trimkv, cache, prefix.info, "context", [len(ids)], row_seeds(cache, 0))
        assert trimkv.score is not None
        said = trimkv.score.log_retention(cut.view(cache.ragged[0], 0))
    assert said is not None
    trace = pass_by(model, ids, spec, "13")
    for head in range(2):
        slow = oracles.algorithm_1(said[0, head].tolist(), 13)
        assert trace.eviction_steps[0, head].tolist() == slow
        assert slow != oracles.algorithm_1([-1.0] * len(ids), 13)  # it is no plain window


@pytest.mark.parametrize(
    ("name", "more"), [("trimkv", ":buffer=0"), ("dbtrimkv", ":buffer=7"), ("snapkv", ":window=4")]
)
def test_it_is_what_an_attached_model_holds_after_every_token(
    model: Any, ids: list[int], gates: dict[str, str], name: str, more: str
) -> None:
    spec = gates.get(name, name) + more + ":buffer=3" * (name == "snapkv")
    trace = pass_by(model, ids, spec, "0.2")
    assert trace.budget == 12
    seen = looked_at(model, ids, spec, 12)
    maps = steps.held_at_steps(trace.eviction_steps, torch.arange(len(ids)))
    for t, held in enumerate(seen):
        assert torch.equal(maps[..., t, : t + 1], held)
        assert torch.equal(trace.entries[..., t], held.sum(-1))
    assert trace.eviction_count > 3
    if name == "dbtrimkv":  # one budget for all heads
        last = trace.entries[..., -1]
        assert last.min() < last.max()
        assert int(trace.entries.sum((0, 1)).max()) == 6 * (12 + 7) - 6


@pytest.mark.parametrize("spec", ["snapkv:window=4", "dbtrimkv"])
def test_once_is_what_kept_keeps(model: Any, ids: list[int], gates: dict[str, str], spec: str) -> None:
    chosen = policy(gates.get(spec, spec))
    with engine(model), torch.no_grad():
        prefix = Prefix(model, chosen.needs)
        prefix.extend(torch.tensor([ids[:50]]))
        trace = steps.trace_compression(prefix, chosen, Budget.parse("0.3"), 0, 50, len(ids))
    kept = kvbench.kept(model, torch.tensor([ids[:50]]), chosen, "0.3")
    held = torch.stack([layer[0] for layer in kept if layer is not None])
    assert torch.equal(trace.held[..., :50], held)
    assert trace.held[..., 50:].all()
    assert (trace.eviction_steps[~trace.held] == 49).all()  # the context's last token ends the step
    assert (trace.budget, trace.eviction_count) == (15, 1)
    assert trace.entries[..., 48].unique().tolist() == [49]
    assert int(trace.entries[..., 49].sum()) == 6 * 15
    assert torch.equal(trace.entries[..., -1], trace.entries[..., 49] + 11)


def test_a_budget_that_is_never_full_evicts_nothing(model: Any, ids: list[int]) -> None:
    local = policy("local:buffer=30")
    assert steps.evicts_nothing(local, 32, len(ids))
    assert not steps.evicts_nothing(local, 31, len(ids))
    for budget, cuts in (("32", 0), ("31", 1)):
        trace = pass_by(model, ids, str(local), budget)
        assert trace.eviction_count == cuts
        assert bool(trace.held.all()) == (cuts == 0)
