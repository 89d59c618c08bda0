"""Eviction equals masking: logits agree with a full cache whose evicted entries are -inf."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvbench
from kvbench.engine.attend import _attend_padded, attend
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import NewTokens
from kvbench.engine.session import AttachedCache

from .conftest import batch, build, masked_run, step

RAGGED = "random:allocate=global"
CONTEXT, QUESTION, STEPS = 41, 7, 3


def run(
    model: Any, pads: list[int], budget: Any, policy: str = RAGGED, gap: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], AttachedCache]:
    """Context, question (with `gap` columns of padding in the last row), single steps.

    Returns:
        Our logits, the oracle's, the full cache's, and the cache.
    """
    total = CONTEXT + QUESTION + STEPS
    ids, mask = batch(len(pads), total, pads)
    mask[-1, CONTEXT : CONTEXT + gap] = 0
    parts = [CONTEXT, QUESTION] + [1] * STEPS
    chunks = list(ids.split(parts, 1))
    ours, first = [], 0
    with torch.no_grad():
        with kvbench.attach(model, policy, budget, seed=3) as cache:
            for chunk in chunks:
                ours.append(step(model, cache, chunk, mask, first))
                if first == 0:
                    kept = cache.kept()
                first += chunk.shape[1]
        theirs = masked_run(model, chunks, mask, [None] + [kept] * (len(parts) - 1))
        full = masked_run(model, chunks, mask, [None] * len(parts))
    valid = mask.bool().split(parts, 1)

    def real(found: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x[v] for x, v in zip(found, valid, strict=True)]

    return real(ours), real(theirs), real(full), cache


def worst(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("pads", "gap"), [([0], 0), ([0, 9, 3], 0), ([0, 9, 3], 4)], ids=["alone", "padded", "gap"])
def test_ragged_eviction_equals_masking(family: Any, pads: list[int], gap: int) -> None:
    ours, theirs, full, cache = run(family, pads, 0.3, gap=gap)
    assert worst(ours, theirs) < 1e-5 * max(1.0, float(theirs[0].abs().max()))
    # The negative control: the same oracle without masking must be far away.
    assert worst(ours[1:], full[1:]) > 1e-2
    lengths = [x.length for x in cache.ragged]
    assert len({n for layer in lengths for n in layer}) > 1, "heads keep different amounts"


def test_full_budget_equals_the_plain_model(family: Any) -> None:
    ours, _, full, _ = run(family, [0, 9], "full")
    assert worst(ours, full) < 1e-5 * max(1.0, float(full[0].abs().max()))


def test_the_cache_is_found_by_name_and_by_position(llama: Any) -> None:
    """transformers renamed `past_key_values` to `cache`, and a model's own code may pass it without a name."""
    ids, _ = batch(1, CONTEXT, [0])
    expected = kvbench.kept(llama, ids, RAGGED, 0.3, seed=3)
    for is_named in (True, False):
        with kvbench.attach(llama, RAGGED, 0.3, seed=3) as cache:
            if is_named:
                llama.model(ids, past_key_values=cache, use_cache=True)
            else:
                llama.model(ids, None, None, cache, use_cache=True)
            assert all(torch.equal(a, b) for a, b in zip(cache.kept(), expected, strict=True))


def test_one_entry_per_head(llama: Any) -> None:
    ours, theirs, _, cache = run(llama, [0, 5], 1, policy="random")
    assert worst(ours, theirs) < 1e-4
    held = CONTEXT + QUESTION + STEPS - CONTEXT + 1
    assert all(n == held for layer in cache.ragged for n in layer.length)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_is_as_near_as_masking_in_bfloat16(name: str) -> None:
    exact = build(name)
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    policy = "local"  # keeps the same entries in both precisions
    _, truth, full, _ = run(exact, [0, 9], 0.3, policy)
    ours, theirs, _, _ = run(rounded, [0, 9], 0.3, policy)
    assert worst(ours, truth) <= 2 * worst(theirs, truth)
    assert worst(truth[1:], full[1:]) > worst(ours, truth)


def test_sliding_layers_stay_untouched() -> None:
    model = build("gemma3")
    ids, mask = batch(1, CONTEXT, [0])
    kept = kvbench.kept(model, ids, "random", 0.3, mask)
    sliding = [t == "sliding_attention" for t in model.config.layer_types]
    assert [k is None for k in kept] == sliding
    with kvbench.attach(model, "random", 0.3) as cache:
        assert [isinstance(x, RaggedLayer) for x in cache.layers] == [not s for s in sliding]


def test_a_model_with_nothing_but_sliding_layers_is_refused() -> None:
    model = build("mistral_sliding")
    with pytest.raises(ValueError, match="nothing to evict"):
        kvbench.kept(model, batch(1, 20, [0])[0], "random", 0.3)


def test_both_ways_to_attend_agree(llama: Any) -> None:
    """The rectangle (GPU, and where mass is wanted) against the loop over segments."""
    ids, mask = batch(2, CONTEXT, [0, 9])
    g = torch.Generator().manual_seed(0)
    with torch.no_grad(), kvbench.attach(llama, RAGGED, 0.3) as cache:
        step(llama, cache, ids, mask, 0)
        layer = cache.ragged[0]
        for first, n in ((CONTEXT, 1), (CONTEXT + 1, 5)):
            shape = (2, layer.heads, n, layer.dim)
            layer.update(torch.randn(shape, generator=g), torch.randn(shape, generator=g))
            layer.append(NewTokens.everywhere(2, n, first, ids.device))
            query = torch.randn(2, 8, n, layer.dim, generator=g)
            loop, _ = attend(query, layer, first, 0.3)
            rectangle, _ = _attend_padded(query, layer, first, 0.3, (), None)
            assert torch.allclose(loop, rectangle, atol=1e-5)
            part, _ = attend(query[1:], layer.sequence(1), first, 0.3)  # shares the memory
            assert torch.equal(part, loop[1:])
            found = []
            for way in (attend, _attend_padded):
                explicit, mass = way(query, layer, first, 0.3, (1, 2), None)
                assert torch.allclose(loop, explicit, atol=1e-5)
                segments = mass[1].split(layer.length)
                assert all(torch.allclose(x.sum(0), torch.full((4,), float(n))) for x in segments)
                found.append(mass)
            assert all(torch.allclose(found[0][p], found[1][p], atol=1e-5) for p in (1, 2))
