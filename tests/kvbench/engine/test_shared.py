"""Cells that read their entries where they were prefilled answer, to the bit, as those that hold copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench import native
from kvbench.budget import Budget
from kvbench.engine import decide
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import Batch, DecodeRow, Stop
from kvbench.engine.driver import engine, forward
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.pool import Pool, Pooled
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.refill import vacate
from kvbench.engine.shared import SharedEntries
from kvbench.errors import BudgetError
from kvbench.plugin import Policy, Score, Scores, View
from tests.kernels import torch_path
from tests.kvbench.engine.conftest import batch, build
from tests.kvbench.engine.test_pool import Words

CELLS = [("snapkv:window=8", "0.5"), ("adakv:window=8", "0.3"), ("h2o", "1"), ("random", "0.2"), ("full", "full")]
TOKENS, RESERVE = 45, 20
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler, or native code is turned off")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    made = build("llama")
    with torch.no_grad(), engine(made):
        yield made


def prefilled(model: Any, cells: list[Compression], seed: int = 0) -> Prefix:
    ids, _ = batch(1, TOKENS, [0], seed=seed)
    prefix = Prefix(model, {need for cell in cells for need in cell.policy.needs})
    prefix.extend(ids)
    prefix.remake = lambda: prefilled(model, cells, seed)
    return prefix


def wanted(cells: list[tuple[str, str]] = CELLS) -> list[Compression]:
    return [Compression(kvbench.policy(policy), Budget.parse(budget), "context", 0) for policy, budget in cells]


def compressed(model: Any, seed: int = 0) -> tuple[Prefix, list[RaggedCache]]:
    prefix = prefilled(model, wanted(), seed)
    return prefix, prefix.compress(wanted(), RESERVE)


def copies(caches: list[RaggedCache]) -> list[RaggedCache]:
    """The same caches with rows for all entries."""
    made = [cache.fork() for cache in caches]
    for cache in made:
        for layer in cache.ragged:
            layer.materialise()
            assert not layer.is_shared
    return made


def test_cells_share_the_prefill_and_say_what_they_hold(model: Any) -> None:
    prefix, caches = compressed(model)
    dense = prefix.cache.ragged[0].key
    full = prefix.cache.allocated_bytes()
    for (_, budget), cache, copied in zip(CELLS, caches, copies(caches), strict=True):
        (entries,) = cache.ragged[0].shared
        assert isinstance(entries, SharedEntries) and entries.key.data_ptr() == dense.data_ptr()
        assert cache.live_entries() == copied.live_entries() == cache.held_entries[0]
        assert cache.live_bytes() == copied.live_bytes()
        assert cache.full_bytes(0) == copied.full_bytes(0)
        assert full < cache.allocated_bytes(0) < full + copied.allocated_bytes(0), budget
        for a, b in zip(cache.kept(), copied.kept(), strict=True):
            assert torch.equal(a, b)
        for layer, own in zip(cache.ragged, copied.ragged, strict=True):
            visual = torch.arange(TOKENS) % 3 == 0
            assert int(layer.entries_among(visual, 0)) == int(own.entries_among(visual, 0))
    together = RaggedCache.stack(caches)
    apart = sum(cache.allocated_bytes() for cache in caches)
    assert together.allocated_bytes() == apart - (len(caches) - 1) * full, "one prefill for all"


def test_rows_for_a_question_are_reserved_at_once(model: Any) -> None:
    _, (cache, *_) = compressed(model)
    layer, copied = cache.ragged[0], copies([cache])[0].ragged[0]
    rooms = copied.reserved_room()
    for expecting in (layer, copied):
        expecting.expect(2)
        assert expecting.reserved_room() == ([RESERVE] * layer.heads if expecting is layer else rooms)
        expecting.expect(40)
    assert min(layer.reserved_room()) > 40 and copied.reserved_room() == rooms


def test_the_bytes_of_a_cell_are_the_same_alone(model: Any) -> None:
    _, together = compressed(model)
    for cell, cache in zip(CELLS, together, strict=True):
        (alone,) = prefilled(model, wanted()).compress(wanted([cell]), RESERVE)
        assert alone.ragged[0].is_shared
        assert alone.footprint(0) == cache.footprint(0)


def test_prefills_that_cannot_be_made_again_are_copied(model: Any) -> None:
    prefix = prefilled(model, wanted())
    prefix.remake = None
    assert not any(cache.ragged[0].is_shared for cache in prefix.compress(wanted(), RESERVE))
    prefix = prefilled(model, wanted())
    assert not any(cache.ragged[0].is_shared for cache in prefix.compress(wanted())), "without a reserve"


@pytest.mark.parametrize("policy", ["cam", "full:bits=4", "quest", "snapkv:window=8:key_channels=0.5"])
def test_what_changes_or_selects_entries_has_rows_of_its_own(model: Any, policy: str) -> None:
    cells = wanted([(policy, "0.5"), ("full", "full")])
    cache, full = prefilled(model, cells).compress(cells, RESERVE)
    assert full.ragged[0].is_shared and not cache.ragged[0].is_shared


QUESTION = [[7], [5, 3, 8], [*range(20, 30)], [*range(40, 80)]]
"""Questions of one to forty tokens."""


@pytest.mark.parametrize("question", QUESTION, ids=len)
def test_logits_are_those_of_copies_to_the_bit(model: Any, question: list[int]) -> None:
    _, caches = compressed(model)
    for cache, copied in zip(caches, copies(caches), strict=True):
        for tokens in (question, [9], [4]):
            shared, own = (forward(model, one, torch.tensor([tokens])) for one in (cache, copied))
            assert torch.equal(shared, own)
        assert cache.ragged[0].is_shared, "new tokens do not need a copy"
        for a, b in zip(cache.kept(), copied.kept(), strict=True):
            assert torch.equal(a, b)


def test_rows_grow_with_the_answer(model: Any) -> None:
    prefix = prefilled(model, wanted())
    cache = prefix.compress(wanted(), reserve=500)[0]
    (copied,) = copies([cache])
    for step in range(7):
        tokens = torch.arange(10 * step, 10 * step + 10)[None]
        assert torch.equal(*(forward(model, one, tokens) for one in (cache, copied)))
        assert all(room < 10 * step + 64 for room in cache.ragged[0].room), "not for 500 tokens"
    assert cache.ragged[0].is_shared


@torch_path
def test_logits_are_nearly_those_of_torch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, caches = compressed(model)
    again = [cache.fork() for cache in caches]
    native_logits = [forward(model, cache, torch.tensor([[5, 3, 8]])) for cache in caches]
    monkeypatch.setattr(native, "library", lambda: None)
    for near, cache in zip(native_logits, again, strict=True):
        logits = forward(model, cache, torch.tensor([[5, 3, 8]]))
        torch.testing.assert_close(near, logits, rtol=1e-4, atol=1e-4)
        assert not torch.equal(near, logits), "both went the same way"


def responses(model: Any, caches: list[RaggedCache], rows: list[int], room: int) -> dict[int, list[int]]:
    pool: Pool[int] = Pool(model, rows, [max(1, rows[0] // 2)], 5, lambda count, _: count <= room)
    items = []
    for index, cache in enumerate(caches):
        row = DecodeRow(1 + (5 * index) % 11, Stop(Words(), [3 * index], []))
        items.append(Pooled(row, cache, [10 + index, *range(1, 1 + index % 4)], None, index))
    ended = [done for item in items for done in pool.add(item)]
    ended += pool.drain()
    return {item.owner: item.row.tokens for item in ended}


@pytest.mark.parametrize("shared", [True, False])
def test_rows_without_memory_get_what_cells_that_read_in_place_need(model: Any, shared: bool) -> None:
    caches = compressed(model)[1]
    caches = [cache.fork() for cache in (caches if shared else copies(caches)) * 2][:8]
    pool: Pool[int] = Pool(model, [8], [2], 5, lambda count, _: count <= 8)
    entries = []
    for index, cache in enumerate(caches):
        list(pool.add(Pooled(DecodeRow(9, Stop(Words(), [], [])), cache, [10, 11], None, index)))
        if pool.cache is not None:
            entries.append(len(pool.cache.ragged[0].col))
    own = [sum(cache.ragged[0].reserved_room()) for cache in caches]
    assert len(pool.active) == 8
    assert all(item.cache is None for item in pool.active.values()), "their memory is freed"
    assert entries[0] == (8 * own[0] if shared else own[0] + own[1]), "copies would need too much memory"
    assert entries[-1] == sum(own)


@pytest.mark.parametrize(("rows", "room"), [([5], 3), ([8, 9, 12], 12)])
def test_a_pool_with_shared_and_copied_cells_answers_as_with_copies(model: Any, rows: list[int], room: int) -> None:
    caches = [cache for seed in range(3) for cache in compressed(model, seed)[1]]
    expected = responses(model, copies(caches), rows, room)
    mixed = [cache if index % 4 else copies([cache])[0] for index, cache in enumerate(caches)]
    assert responses(model, mixed, rows, room) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > 10


def read_by_kernels(layer: RaggedLayer) -> list[list[int]]:
    addresses = layer.shared_addresses()
    read = [*layer.bounds(), torch.zeros(0) if addresses is None else addresses, torch.tensor(layer.entry_counts())]
    return [tensor.flatten().tolist() for tensor in read]


@pytest.mark.parametrize("rows", [[0], [1, 3], [0, 1, 2, 3, 4]])
def test_what_kernels_read_of_a_batch_follows_its_vacant_rows(model: Any, rows: list[int]) -> None:
    cache = Batch(model, compressed(model)[1], 5).cache
    forward(model, cache, torch.tensor([[5, 3, 8]] * 5))
    vacate(cache, rows)
    for layer in cache.ragged:
        found = read_by_kernels(layer)
        layer.forget_bounds()
        assert found == read_by_kernels(layer)
        assert [count > 0 for count in found[-1]] == [row not in rows for row in range(5) for _ in range(layer.heads)]


def test_a_batch_and_its_branches_are_those_of_copies(model: Any) -> None:
    _, caches = compressed(model)

    def outputs(of: list[RaggedCache]) -> list[Tensor]:
        whole = Batch(model, of, 6)
        logits = [whole.feed([[5, 3], [8], [], [1, 2, 3], [4]], 3)]
        branches = whole.branches([0, 0, 3, 4], 5)
        logits += [branches.feed([[4], [5], [6], [7]], 1), whole.feed([[9]] * 5, 1)]
        return [*logits, *(mask for mask in whole.cache.kept() if mask is not None)]

    for shared, own in zip(outputs(caches), outputs(copies(caches)), strict=True):
        assert torch.equal(shared, own)


def test_a_wrong_base_is_noticed(model: Any) -> None:
    _, caches = compressed(model)
    cache, copied = caches[0], copies(caches)[0]
    (entries,) = cache.ragged[1].shared
    assert entries is not None
    addresses = entries.addresses.clone()
    addresses[1, 1] -= entries.value.element_size()
    cache.ragged[1].shared = [replace(entries, addresses=addresses)]
    shared, own = (forward(model, one, torch.tensor([[5, 3, 8]])) for one in (cache, copied))
    assert not torch.equal(shared, own)


@dataclass(frozen=True)
class Spoils(Score):
    """Writes to the keys of the prefill."""

    def score(self, v: View) -> Scores | Tensor:
        v.key.data.mul_(0)
        return v.noise()


def test_cells_that_wait_get_the_right_entries_back_whenever_a_policy_spoils_them(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "_COPIED", 1)  # policies see the prefill's own K and V
    prefix, caches = compressed(model)
    expected = [layer.key.clone() for layer in prefix.cache.ragged if layer.key is not None]
    usual = kvbench.policy("random")
    spoiler = Policy("spoiler", Spoils(), usual.allocate, usual.select)
    for _ in range(2):
        with pytest.raises(BudgetError, match="key"):
            prefix.compress([Compression(spoiler, Budget.parse("0.5"), "context", 0)], RESERVE)
        (spoiled,) = caches[-1].ragged[0].shared
        assert spoiled is not None and not spoiled.key.any()
        prefix.restore()
        for cache in caches:
            for layer, key in zip(cache.ragged, expected, strict=True):
                assert layer.shared[0] is not None and torch.equal(layer.shared[0].key, key)
        caches += prefix.compress(wanted(), RESERVE)  # they read another prefill
