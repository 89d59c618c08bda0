"""Merged keys and values against loops over their equations, over several cuts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.plugin import Merger, View
from kvbench.spelling import policy

from .caches import Cache, Oracle, asked_oracle, ema_oracle, ema_release_oracle, value_oracle


def oracle_of(spec: str, cache: Cache) -> Oracle:
    return {
        "ema": ema_oracle(0.7),
        "ema:ema=0.2": ema_oracle(0.2),
        "ema:variant=release": ema_release_oracle(0.5),
        "ema:variant=release:ema=0.9": ema_release_oracle(0.9),
        "ema:merge_threshold=none": asked_oracle(threshold="none"),
        "ema:merge_weights=uniform": asked_oracle(weights="uniform"),
        "ema:merge_on=values": asked_oracle(on="values"),
        "ema:merge_on=separate": asked_oracle(on="separate"),
        "ema:merge_threshold=none:merge_weights=uniform:merge_on=separate": asked_oracle("uniform", "none", "separate"),
        "value": value_oracle(cache, 32),
        "value:merge_span=1": value_oracle(cache, 1),
        "value:merge_span=5": value_oracle(cache, 5),
    }[spec]


def merger_of(spec: str) -> Merger:
    found = policy("knorm:merge=" + spec).merge
    assert found is not None
    return found


MERGERS = [
    "ema",
    "ema:ema=0.2",
    "ema:variant=release",
    "ema:variant=release:ema=0.9",
    "ema:merge_threshold=none",
    "ema:merge_weights=uniform",
    "ema:merge_on=values",
    "ema:merge_on=separate",
    "ema:merge_threshold=none:merge_weights=uniform:merge_on=separate",
    "value",
    "value:merge_span=1",
    "value:merge_span=5",
]


def random_keep(v: View, how: str, rng: np.random.Generator) -> Tensor:
    """Any entries: the same number or another one in every head."""
    noise = torch.from_numpy(rng.random(v.shape)).masked_fill(~v.valid, -1.0)
    held = v.valid.sum(-1)
    if how == "one":
        count = held.clamp(max=1)
    elif how == "all":
        count = held
    elif how == "half":
        count = (held + 1) // 2
    else:  # ragged, some heads with nothing or everything
        count = torch.from_numpy(rng.integers(0, held.max().item() + 1, held.shape))
        count = torch.minimum(count, held)
    return noise.argsort(-1, descending=True).argsort(-1) < count[..., None]


SHAPES = [((63,), 1, None), ((41, 17, 30), 2, None), ((41, 17, 30), 2, 50), ((33, 5, 1), 4, None)]


@pytest.mark.parametrize("spec", MERGERS)
@pytest.mark.parametrize(("lengths", "group", "block"), SHAPES, ids=str)
def test_merged_entries_agree_with_the_oracle_over_several_cuts(
    spec: str,
    lengths: tuple[int, ...],
    group: int,
    block: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if block is not None:  # a few entries at a time
        monkeypatch.setattr("kvbench_policies.merging.BLOCK", block)
        monkeypatch.setattr("kvbench_policies.d2o._BLOCK", block * 7)
    merger = merger_of(spec)
    for plan in (
        ["half", "half", "half", "half"],
        ["ragged", "all", "ragged", "ragged", "one"],
        ["all", "one", "ragged", "half"],
        ["one", "half", "all", "ragged"],
    ):
        rng = np.random.default_rng(len(plan) + group)
        cache = Cache(list(lengths), heads=3, group=group, rng=rng)
        oracle = oracle_of(spec, cache)
        for turn, how in enumerate(plan):
            v = cache.view("decode" if turn else "context", [1] * len(lengths))
            assert cache.cut(v, random_keep(v, how, rng), merger, oracle) < 1e-5
            cache.append([(7 * turn + 3 * r) % 11 + 1 for r in range(len(lengths))])


def test_the_alternatives_of_the_merger_differ_from_the_paper_and_from_each_other() -> None:
    """Otherwise the comparison with the oracle could not tell them apart."""
    rng = np.random.default_rng(8)
    v = Cache([60], heads=2, group=1, rng=rng).view("context", [1])
    keep = random_keep(v, "half", rng)
    merged = [merger_of(spec).merge(v, keep, {}) for spec in MERGERS if spec.startswith("ema")]
    results = [torch.cat([key, value], -1)[keep] for key, value in merged]
    different = [spec for spec in MERGERS if spec.startswith("ema") and "ema=" not in spec]
    chosen = [result for spec, result in zip(MERGERS, results, strict=False) if spec in different]
    assert len(chosen) == 7
    for index, one in enumerate(chosen):
        assert not any(torch.allclose(one, other) for other in chosen[:index])
    assert str(policy("d2o:merge_threshold=ema:merge_on=keys")) == "d2o"


def test_what_receives_nothing_does_not_change() -> None:
    rng = np.random.default_rng(5)
    cache = Cache([60], heads=2, group=1, rng=rng)
    v = cache.view("context", [1])
    keep = random_keep(v, "half", rng)
    key, value = merger_of("ema").merge(v, keep, {})
    changed = (key != v.key).any(-1)
    assert torch.equal(changed, (value != v.value).any(-1))
    assert 0 < int(changed.sum()) < int(keep.sum())
    assert not bool((changed & ~keep).any())
    key, value = merger_of("value").merge(v, keep, {})
    assert key is v.key
    assert 0 < int((value != v.value).any(-1).sum()) <= int(keep.sum())


def test_of_equally_near_kept_entries_the_more_recent_takes_the_evicted() -> None:
    cache = Cache([20], heads=1, group=1, rng=np.random.default_rng(7))
    v = cache.view("context", [1])
    v.key = torch.ones_like(v.key)
    keep = torch.zeros_like(v.valid)
    keep[..., [2, 5, 11]] = True
    _, value = merger_of("ema").merge(v, keep, {})
    assert (value != v.value).any(-1).nonzero().tolist() == [[0, 0, 11]]
    torch.testing.assert_close(
        value[0, 0, 11], v.value[0, 0, [*range(20)]].sum(0).sub(v.value[0, 0, [2, 5]].sum(0)) / 18
    )


def test_an_evicted_value_goes_to_those_behind_it_alone() -> None:
    """Where fewer than `merge_span` are left each still gets its `merge_span`-th part."""
    cache = Cache([20], heads=1, group=1, rng=np.random.default_rng(7))
    v = cache.view("context", [1])
    keep = torch.ones_like(v.valid)
    keep[..., [4, 17, 19]] = False
    v.obs = {need: torch.ones_like(x) for need, x in v.obs.items()}  # merged with probability 1
    _, value = merger_of("value:merge_span=5").merge(v, keep, {})
    expected = v.value[0, 0].clone()
    expected[5:10] += v.value[0, 0, 4] / 5
    expected[18] += v.value[0, 0, 17] / 5
    torch.testing.assert_close(value[keep], expected[keep[0, 0]])


def test_an_evicted_value_goes_no_further_than_its_span() -> None:
    """Tokens far from any kept one are lost; a kept value gains at most its neighbours' mean."""
    cache = Cache([100], heads=1, group=1, rng=np.random.default_rng(7))
    v = cache.view("context", [1])
    keep = torch.zeros_like(v.valid)
    keep[..., [40, 43, 99]] = True
    v.obs = {need: torch.ones_like(x) for need, x in v.obs.items()}  # merged with probability 1
    _, value = merger_of("value:merge_span=5").merge(v, keep, {})
    x = v.value[0, 0]
    expected = {
        40: x[40] + x[35:40].sum(0) / 5,
        43: x[43] + x[[38, 39, 41, 42]].sum(0) / 5,
        99: x[99] + x[94:99].sum(0) / 5,
    }
    for token, row in expected.items():
        torch.testing.assert_close(value[0, 0, token], row)


def test_value_merging_is_seeded() -> None:
    rng = np.random.default_rng(5)
    cache = Cache([60], heads=2, group=1, rng=rng)
    v = cache.view("context", [1])
    keep = random_keep(v, "half", rng)
    first, again = (merger_of("value").merge(v, keep, {})[1] for _ in range(2))
    assert torch.equal(first, again)
    v.seed = v.seed + 1
    assert not torch.equal(first, merger_of("value").merge(v, keep, {})[1])


def test_a_threshold_that_was_never_set_may_be_stored_as_zeros() -> None:
    """A batch may hold rows that were cut before and rows that were not."""
    rng = np.random.default_rng(6)
    cache = Cache([30, 30], heads=2, group=1, rng=rng)
    v = cache.view("context", [1, 1])
    keep = random_keep(v, "half", rng)
    for spec in MERGERS:
        merger, state = merger_of(spec), dict[str, Tensor]()
        expected = merger.merge(v, keep, state)
        zeros = {name: torch.zeros_like(x) for name, x in state.items()}
        for a, b in zip(merger.merge(v, keep, zeros), expected, strict=True):
            assert torch.equal(a[keep], b[keep])
