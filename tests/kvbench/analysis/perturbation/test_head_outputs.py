"""The formulas on random data, against loops over heads and entries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.analysis.perturbation import head_outputs
from kvbench.analysis.perturbation.head_outputs import FullCacheQuery, value_norms
from kvbench.view.softmax import LogitScale, cap_of, sinks_of

from . import oracles

NAMES = (
    "l1", "entries", "stage1", "mass", "stage1_mass", "top_mass", "bound1", "bound2", "bound3",
)  # fmt: skip


def random_layer(
    group: int, n: int, seed: int, sharp: float = 3.0, *, cap: float | None = None, has_sinks: bool = False
) -> FullCacheQuery:
    g = torch.Generator().manual_seed(seed)
    heads, d, width = 2, 5, 12

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    key, value = normal(heads, n, d), normal(heads, n, d) * normal(heads, n, 1).exp()
    weight = normal(heads * group, d, width)
    query = normal(heads * group, d) * sharp
    scale = LogitScale(d**-0.5, cap, normal(heads * group) if has_sinks else None)
    return FullCacheQuery(query, key, value, weight, scale, value_norms(value, weight))


def random_sets(n: int, heads: int, seed: int) -> tuple[Tensor, Tensor]:
    """What is kept (at least one entry), and a part of it (at least one entry)."""
    g = torch.Generator().manual_seed(1000 + seed)
    kept, first = torch.zeros(2, heads, n, dtype=torch.bool)
    for h in range(heads):
        size = int(torch.randint(1, n + 1, (1,), generator=g))
        order = torch.randperm(n, generator=g)[:size]
        kept[h, order] = True
        first[h, order[: int(torch.randint(1, size + 1, (1,), generator=g))]] = True
    return kept, first


def expected(seen: FullCacheQuery, kept: Tensor, first: Tensor) -> list[dict[str, float]]:
    out = []
    n = seen.key.shape[1]
    for q in range(seen.query.shape[0]):
        h = q // seen.group
        key, value, weight, query = (
            x.double().numpy() for x in (seen.key[h], seen.value[h], seen.weight[q], seen.query[q])
        )
        inside = [i for i in range(n) if kept[h, i]]
        sinks = sinks_of(seen.scale)
        addition = {} if sinks is None else {"sink": float(sinks[q])}
        a = oracles.attention_weights(query, key, seen.scale, range(n), cap_of(seen.scale), **addition)
        a_kept = oracles.attention_weights(query, key, seen.scale, inside, cap_of(seen.scale), **addition)
        stage1 = [i for i in inside if first[h, i]]
        sink = 0.0 if sinks is None else 1 - a.sum()
        out.append(oracles.one_head(a, a_kept, value, weight, inside, stage1, sink))
    return out


@pytest.mark.parametrize(("cap", "has_sinks"), [(None, False), (None, True), (1.5, False), (1.5, True)])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 17])
def test_every_number_is_that_of_the_definition(group: int, n: int, cap: float | None, has_sinks: bool) -> None:
    for seed in range(4):
        seen = random_layer(group, n, seed, cap=cap, has_sinks=has_sinks)
        kept, first = random_sets(n, 2, seed)
        found = seen.evict(kept, first).heads
        want = expected(seen, kept, first)
        for name in NAMES:
            wanted = [w[name] for w in want]
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-9, err_msg=name)
        np.testing.assert_allclose(seen.head_output, [w["output"] for w in want], rtol=1e-9)


def test_the_layers_change_is_the_sum_of_its_heads() -> None:
    seen = random_layer(2, 9, 0)
    kept, first = random_sets(9, 2, 0)
    change = np.zeros(12)
    whole = np.zeros(12)
    for q in range(4):
        h = q // 2
        key, value, weight, query = (
            x.double().numpy() for x in (seen.key[h], seen.value[h], seen.weight[q], seen.query[q])
        )
        inside = [i for i in range(9) if kept[h, i]]
        a = oracles.attention_weights(query, key, seen.scale, range(9))
        left = oracles.attention_weights(query, key, seen.scale, inside)
        whole += oracles.projected(a, value, weight)
        change += oracles.projected(a, value, weight) - oracles.projected(left, value, weight)
    np.testing.assert_allclose(seen.evict(kept, first).change, change, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(seen.output, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("sharp", [0.3, 3.0, 30.0])
def test_the_theorems_hold_on_random_data(group: int, sharp: float, has_sinks: bool) -> None:
    held = 0
    for seed in range(60):
        seen = random_layer(group, 13, seed, sharp, has_sinks=has_sinks)
        kept, first = random_sets(13, 2, seed)
        found = {k: x.numpy() for k, x in seen.evict(kept, first).heads.items()}
        slack = 1e-5 * found["bound1"] + 1e-9
        assert (found["l1"] <= found["bound1"] + slack).all()  # Theorem 3.3: always
        assert (found["bound1"] <= found["bound2"] + slack).all()
        holds = found["stage1_mass"] > 0.5  # Assumption 3.4
        held += int(holds.sum())
        assert (found["l1"] <= found["bound2"] + slack)[holds].all()  # Theorem 3.5
        assert (found["bound2"] <= found["bound3"] + slack)[holds].all()  # Theorem C.1
    assert held > 10  # the check of the last two is no check of nothing


def test_without_the_assumption_the_third_bound_can_fail() -> None:
    below = 0
    for seed in range(60):
        seen = random_layer(1, 13, seed, 0.3)
        kept, first = random_sets(13, 2, seed)
        found = seen.evict(kept, first).heads
        below += int((found["bound3"] < found["bound2"] * (1 - 1e-6)).sum())
    assert below > 0


def test_the_first_bound_is_attained_where_all_changes_point_one_way() -> None:
    value = torch.ones(1, 6, 3)
    value[:, :2] *= -1.0  # what is kept gains weight, what goes loses it
    weight = torch.rand(1, 3, 8, generator=torch.Generator().manual_seed(0))
    key = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(1))
    seen = FullCacheQuery(torch.ones(1, 3), key, value, weight, 1.0, value_norms(value, weight))
    kept = torch.tensor([[True, True, False, False, False, False]])
    found = seen.evict(kept, kept).heads
    assert float(found["l1"]) == pytest.approx(float(found["bound1"]), rel=1e-6)
    assert float(found["bound2"]) == pytest.approx(float(found["bound1"]), rel=1e-6)


def test_nothing_evicted_is_nothing_changed_and_nothing_kept_is_everything() -> None:
    seen = random_layer(2, 7, 0)
    every = torch.ones(2, 7, dtype=torch.bool)
    whole = seen.evict(every, every).heads
    assert float(whole["l1"].max()) == 0.0
    np.testing.assert_allclose(whole["bound1"], 0.0, atol=1e-9)
    np.testing.assert_allclose(whole["mass"], 1.0)
    none = seen.evict(~every, ~every).heads
    np.testing.assert_allclose(none["l1"], seen.head_output)
    assert (none["l1"] <= none["bound1"]).all()
    assert none["bound2"].tolist() == [math.inf] * 4
    assert none["top_mass"].tolist() == [0.0] * 4


def test_an_unknown_first_stage_leaves_what_depends_on_it_unknown() -> None:
    seen = random_layer(1, 7, 0)
    kept, _ = random_sets(7, 2, 0)
    found = seen.evict(kept, None).heads
    for name in ("stage1", "stage1_mass", "top_mass", "bound2", "bound3"):
        assert found[name].isnan().all()
    assert found["l1"].isfinite().all() and found["bound1"].isfinite().all()


def test_merged_entries_are_measured_with_what_stands_in_the_cache() -> None:
    seen = random_layer(2, 11, 3)
    kept, first = random_sets(11, 2, 3)
    same = seen.replace(kept, seen.key, seen.value).heads
    np.testing.assert_allclose(same["l1"], seen.evict(kept, first).heads["l1"], rtol=1e-6)
    assert same["bound1"].isnan().all()
    junk = torch.where(kept[..., None], 0.0, torch.nan)  # what is not kept is not read
    merged = seen.replace(kept, 0.5 * seen.key + junk, 2 * seen.value + junk).heads
    for q in range(4):
        h = q // 2
        key, value, weight, query = (
            x.double().numpy() for x in (seen.key[h], seen.value[h], seen.weight[q], seen.query[q])
        )
        inside = [i for i in range(11) if kept[h, i]]
        a = oracles.attention_weights(query, key, seen.scale, range(11))
        left = oracles.attention_weights(query, 0.5 * key, seen.scale, inside)
        change = oracles.projected(a, value, weight) - oracles.projected(left, 2 * value, weight)
        assert float(merged["l1"][q]) == pytest.approx(np.abs(change).sum(), rel=1e-9)


def test_the_norms_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = random_layer(2, 17, 0)
    whole = seen.norm
    monkeypatch.setattr(head_outputs, "_BLOCK", 2 * 12 * 5)
    blocked = value_norms(seen.value, seen.weight)
    for q in range(4):
        for i in range(17):
            row: Any = seen.value[q // 2, i].double() @ seen.weight[q].double()
            assert float(blocked[q, i]) == pytest.approx(float(row.abs().sum()), rel=1e-5)
    np.testing.assert_allclose(blocked, whole, rtol=1e-6)
