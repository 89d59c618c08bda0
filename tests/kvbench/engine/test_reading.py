"""Queries read exactly their budget of a cache that holds everything, as a slow loop says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvbench
from kvbench.engine.reading import Reading, read_entries
from kvbench.engine.session import entries_read
from kvbench.errors import BudgetError, BudgetRefused, UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Blocks, ModelInfo, Policy, Reader

from .conftest import _KEPT, batch, oracle, step


@dataclass(frozen=True)
class Drawn(Reader):
    """Ratings that follow from the query and the sum of a block's keys."""

    name: ClassVar[str] = "drawn"
    size: int = 4

    def block(self, model: ModelInfo) -> int:
        return self.size

    def summary(self, model: ModelInfo) -> int:
        return model.head_dim

    def rate(self, v: Blocks) -> Tensor:
        return torch.einsum("hgnd,hkd->hnk", v.query.float(), v.key.float().sum(2))


def drawn(size: int = 4, dense: int = 0) -> Policy:
    return Policy("drawn", None, Uniform(), TopK(), read=Drawn(size, dense_layers=dense))


def slow_shares(layers: int, dense: int, entries: int, seen: int) -> list[int]:
    """Entries that a query reads of a head in every layer, handed out one by one."""
    if seen <= entries:
        return [seen] * layers
    shares = [seen] * dense + [0] * (layers - dense)
    for i in range(layers * entries - dense * seen):
        shares[dense + i % (layers - dense)] += 1
    return shares


def slow_choice(rating: list[float], seen: int, block: int, entries: int) -> set[int]:
    """Entries that one query of one head reads: the newest block, then by rating."""
    if seen == 0:
        return set()
    newest = (seen - 1) // block
    order = sorted(range(newest), key=lambda k: (-rating[k], -k))
    read: set[int] = set()
    for k in [newest, *order]:
        inside = range(k * block, min((k + 1) * block, seen))
        for entry in reversed(inside):  # the newest entries of a block come first
            if len(read) < entries:
                read.add(entry)
    return read


@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("entries", [1, 5, 16, 29, 30, 40])
def test_exactly_the_budget_is_chosen(block: int, entries: int) -> None:
    g = torch.Generator().manual_seed(block)
    held, seen = 30, torch.tensor([30, 0, 1, 7, 16, 17, 29])
    rating = torch.randint(0, 4, (2, len(seen), held // block), generator=g).float()  # with ties
    mask = read_entries(rating, seen, block, torch.full_like(seen, entries), held)
    for head in range(2):
        for n, count in enumerate(seen.tolist()):
            expected = slow_choice(rating[head, n].tolist(), count, block, entries)
            assert set(mask[head, n].nonzero()[:, 0].tolist()) == expected
            assert len(expected) == min(entries, count)


@pytest.mark.parametrize("dense", [0, 1, 2])
@pytest.mark.parametrize("entries", [9, 10, 11, 12, 40])
def test_dense_layers_are_paid_by_the_others(dense: int, entries: int) -> None:
    info = ModelInfo("m", 5, 2, 4, 8, 16, lambda layer: torch.empty(0))
    how = Reading(Drawn(dense_layers=dense), info, entries)
    seen = torch.arange(20)
    found = torch.stack([how.shares(i, seen) for i in range(5)])
    for n in range(20):
        try:
            how.check(n)
        except BudgetRefused:
            assert dense * n + 5 - dense > 5 * entries
            assert n > entries
            continue
        assert found[:, n].tolist() == slow_shares(5, dense, entries, n)
        assert int(found[:, n].sum()) == 5 * min(n, entries)
        assert int(found[:, n].min()) >= min(n, 1)


def test_a_budget_below_the_dense_layers_is_refused(llama: Any) -> None:
    ids = batch(1, 30, [0])[0]
    with pytest.raises(BudgetRefused, match="use a budget of 21 entries per head or more"):
        entries_read(llama, ids, drawn(dense=2), 15)
    # One token later its dense layers see 31 entries.
    assert entries_read(llama, ids, drawn(dense=2), 21)


def slow_run(model: Any, ids: Tensor, context: int, entries: int, dense: int = 0) -> Tensor:
    """Logits after the context of one sequence, every query reading alone on a full cache."""
    cache, logits = DynamicCache(config=model.config), []
    mask = torch.ones_like(ids)
    with oracle(model):
        step(model, cache, ids[:, :context], mask, 0)
        for first in range(context, ids.shape[1]):

            def choose(module: Any, args: Any, kwargs: Any) -> None:
                query, key = projected(model, module, kwargs)
                old = cache.layers[module.layer_idx].keys
                keys = torch.cat([old, key], 2)[0]
                heads = keys.shape[0]
                keep = torch.zeros(1, heads, keys.shape[1] - 1, dtype=torch.bool)
                for h in range(heads):
                    own = query[0].unflatten(0, (heads, -1))[h, :, 0].float()
                    rating = [
                        float((own @ keys[h, k * 4 : k * 4 + 4].float().sum(0)).sum())
                        for k in range(keys.shape[1] // 4)
                    ]
                    layers = len(model.model.layers)
                    share = slow_shares(layers, dense, entries, keys.shape[1])[module.layer_idx]
                    for entry in slow_choice(rating, keys.shape[1], 4, share):
                        if entry < keep.shape[-1]:
                            keep[0, h, entry] = True
                _KEPT[module.layer_idx] = keep

            handles = [
                layer.self_attn.register_forward_pre_hook(choose, with_kwargs=True) for layer in model.model.layers
            ]
            try:
                logits.append(step(model, cache, ids[:, first : first + 1], mask, first))
            finally:
                for handle in handles:
                    handle.remove()
    return torch.cat(logits, 1)


def projected(model: Any, module: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """Query and key of a layer's new token after RoPE, from its weights."""
    x = kwargs["hidden_states"]
    cos, sin = kwargs["position_embeddings"]
    out = []
    for projection in (module.q_proj, module.k_proj):
        y = projection(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        half = module.head_dim // 2
        turned = torch.cat([-y[..., half:], y[..., :half]], -1)
        out.append(y * cos[:, None] + turned * sin[:, None])
    return out[0], out[1]


@pytest.mark.parametrize(("entries", "dense"), [(1, 0), (6, 0), (13, 0), (100, 0), (17, 1), (32, 2), (100, 3)])
def test_attention_reads_what_a_slow_loop_reads(llama: Any, entries: int, dense: int) -> None:
    ids, mask = batch(3, 46, [0, 7, 15])
    context, question = 33, 9  # the question in one forward, then token by token
    with torch.no_grad(), kvbench.attach(llama, drawn(dense=dense), entries) as cache:
        step(llama, cache, ids[:, :context], mask, 0)
        parts = [step(llama, cache, ids[:, context : context + question], mask, context)]
        for first in range(context + question, 46):
            parts.append(step(llama, cache, ids[:, first : first + 1], mask, first))
        assert cache.live_entries() == 3 * 2 * (46 + 39 + 31)
        got = torch.cat(parts, 1)
    for row, pad in enumerate([0, 7, 15]):
        with torch.no_grad():
            expected = slow_run(llama, ids[row : row + 1, pad:], context - pad, entries, dense)
        torch.testing.assert_close(got[row : row + 1], expected, atol=2e-4, rtol=2e-4)


def test_a_budget_of_everything_is_the_full_cache(llama: Any) -> None:
    ids, mask = batch(2, 40, [0, 5])
    answers = []
    for policy, budget in ((drawn(), 512), ("full", "full")):
        with torch.no_grad(), kvbench.attach(llama, policy, budget) as cache:
            step(llama, cache, ids, mask, 0)
            more = torch.nn.functional.pad(mask, (0, 4), value=1)
            answers.append(step(llama, cache, ids[:, :4], more, 40))
    torch.testing.assert_close(*answers)


def test_rows_read_alone_what_they_read_in_a_batch(family: Any) -> None:
    ids, mask = batch(3, 37, [0, 4, 20])
    together = entries_read(family, ids, drawn(), "0.3", mask)
    for row, pad in enumerate([0, 4, 20]):
        alone = entries_read(family, ids[row : row + 1, pad:], drawn(), "0.3")
        budget = kvbench.Budget.parse("0.3").per_head(37 - pad)
        for many, one in zip(together, alone, strict=True):
            if many is None or one is None:
                assert many is one
                continue
            assert torch.equal(many[row, :, pad:], one[0])
            assert not many[row, :, :pad].any()
            assert one.sum(-1).unique().tolist() == [budget]


def test_bytes_are_those_of_entries_and_summaries(llama: Any) -> None:
    ids, mask = batch(1, 32, [0])
    with torch.no_grad(), kvbench.attach(llama, drawn(), "0.25") as cache:
        step(llama, cache, ids, mask, 0)
        layers, heads, dim = 3, 2, 8
        number = layers * heads * dim * 4
        assert cache.held_entries == [layers * heads * 32]
        assert cache.budget_entries == [layers * heads * 8]
        assert cache.live_bytes(0) == number * (2 * 32 + 8)  # 8 blocks of 4
        assert cache.read_bytes(0) == number * (2 * 8 + 8)
        assert cache.allocated_bytes(0) > cache.live_bytes(0) > cache.full_bytes(0)
    with torch.no_grad(), kvbench.attach(llama, drawn(dense=1), "0.5") as cache:
        step(llama, cache, ids, mask, 0)
        assert cache.budget_entries == [layers * heads * 16]
        assert cache.live_bytes(0) == number * 2 * 32 + number * 8 * 2 // 3  # two have summaries
        assert cache.read_bytes(0) == number * 2 * 16 + number * 8 * 2 // 3
    with torch.no_grad(), kvbench.attach(llama, "full", "full") as cache:
        step(llama, cache, ids, mask, 0)
        assert cache.read_bytes(0) == cache.live_bytes(0) == cache.full_bytes(0)


def test_a_share_holds_for_every_turn(llama: Any) -> None:
    ids, mask = batch(1, 40, [0])
    with torch.no_grad(), kvbench.attach(llama, drawn(), "0.5", moment="turns") as cache:
        step(llama, cache, ids[:, :20], mask, 0)
        cache.compress()
        assert [how.entries for how in cache.readings] == []  # the first turn reads everything
        step(llama, cache, ids[:, 20:], mask, 20)
        cache.compress()
        assert [how.entries for how in cache.readings] == [20]


def test_a_rating_of_another_shape_is_refused(llama: Any) -> None:
    class Wrong(Drawn):
        def rate(self, v: Blocks) -> Tensor:
            return super().rate(v)[..., :-1]

    wrong = Policy("wrong", None, Uniform(), TopK(), read=Wrong())
    with pytest.raises(BudgetError, match=r"returned shape \[2, 1, \d\]; return \[2, 1, \d\]"):
        entries_read(llama, batch(1, 30, [0])[0], wrong, 4)


def test_a_policy_evicts_or_reads_few() -> None:
    snapkv = kvbench.policy("snapkv")
    with pytest.raises(UserError, match="a score and a reader"):
        Policy("both", snapkv.score, Uniform(), TopK(), read=Drawn())


def test_what_reads_everything_has_no_reader_to_ask(llama: Any) -> None:
    with pytest.raises(UserError, match="reads all that it holds"):
        entries_read(llama, batch(1, 8, [0])[0], "snapkv", 4)


def test_summaries_are_of_complete_blocks() -> None:
    info = ModelInfo("m", 1, 2, 4, 8, 16, lambda layer: torch.empty(0))
    how = Reading(Drawn(4), info, 3)
    assert how.summary_bytes(0, [7, 8], 2) == (1 + 2) * 8 * 2
    assert Reading(Drawn(4, dense_layers=1), info, 3).summary_bytes(0, [7, 8], 2) == 0
    assert how.total == 6
