"""`kvbench.attach` and `kvbench.kept` as a user calls them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvbench
from kvbench.plugin import AttentionMass

from .conftest import batch, masked_run, step

GREEDY = {"max_new_tokens": 9, "do_sample": False}


def test_generate_at_full_budget_is_transformers_own(family: Any) -> None:
    ids, mask = batch(2, 40, [0, 11])
    theirs = family.generate(ids, attention_mask=mask, **GREEDY)
    with kvbench.attach(family, "random", "full") as cache:
        ours = family.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert torch.equal(ours, theirs)


def test_generate_compresses_its_prompt_and_frees_it(family: Any) -> None:
    ids, mask = batch(2, 40, [0, 11])
    with kvbench.attach(family, "random", 0.25) as cache:
        out = family.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
        layers = len(cache.ragged)
        heads = cache.ragged[0].heads
        assert cache.held_entries == [layers * heads * 10, layers * heads * 7]
        # The last generated token is not in the cache yet.
        assert cache.live_entries(0) == layers * heads * (10 + 8)
        assert cache.live_bytes() < 0.6 * (cache.full_bytes(0) + cache.full_bytes(1))
        assert cache.allocated_bytes() >= cache.live_bytes()
    first = family.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
    assert torch.equal(out[:, 40], first[:, 40]), "the first token sees the full context"


def test_question_appended_by_generate(llama: Any) -> None:
    context, mask = batch(2, 40, [0, 11])
    question, _ = batch(2, 6, [0, 0], seed=5)
    whole = torch.cat([context, question], 1)
    mask = torch.cat([mask, torch.ones_like(question)], 1)
    with torch.no_grad(), kvbench.attach(llama, "random", 0.25, seed=1) as cache:
        llama(context, attention_mask=mask[:, :40], past_key_values=cache)
        kept = cache.kept()
        out = llama.generate(whole, attention_mask=mask, past_key_values=cache, **GREEDY)
    tail = out[:, 46:]
    chunks = [context, question, *tail[:, :-1].split(1, 1)]
    long = torch.cat([mask, torch.ones_like(tail)], 1)
    logits = masked_run(llama, chunks, long, [None] + [kept] * (len(chunks) - 1))
    expected = torch.stack([x[:, -1].argmax(-1) for x in logits[1:]], 1)
    assert torch.equal(tail, expected)


def test_manual_compression_after_a_chunked_prefill(llama: Any) -> None:
    ids, mask = batch(2, 45, [0, 13])
    with torch.no_grad(), kvbench.attach(llama, "snapkv:window=8", 0.3, compress="manual") as c:
        for first in range(0, 45, 15):
            step(llama, c, ids[:, first : first + 15], mask, first)
        assert c.held_entries is None
        c.compress()
        chunked = c.kept()
        with pytest.raises(ValueError, match="already"):
            c.compress()
    whole = kvbench.kept(llama, ids, "snapkv:window=8", 0.3, mask)
    assert all(torch.equal(a, b) for a, b in zip(chunked, whole, strict=True))


def test_a_row_is_the_same_alone_and_padded(family: Any) -> None:
    ids, mask = batch(3, 37, [0, 8, 20])
    together = kvbench.kept(family, ids, "random", 0.3, mask)
    for row, pad in enumerate([0, 8, 20]):
        alone = kvbench.kept(family, ids[row : row + 1, pad:], "random", 0.3)
        for a, b in zip(alone, together, strict=True):
            if a is not None and b is not None:
                assert torch.equal(a[0], b[row, :, pad:])
                assert not b[row, :, :pad].any()


def test_decode_evicts_at_every_step_like_a_masked_cache(llama: Any) -> None:
    """h2o with no buffer, one eviction a step, against the masked oracle."""
    ids, mask = batch(2, 36, [0, 5])
    chunks = [ids[:, :24], *ids[:, 24:].split(1, 1)]
    ours, kept, first = [], [], 0
    with torch.no_grad(), kvbench.attach(llama, "h2o:buffer=0", 12, moment="decode") as cache:
        for chunk in chunks:
            ours.append(step(llama, cache, chunk, mask, first))
            kept.append(cache.kept())
            first += chunk.shape[1]
            assert all(n == 12 for layer in cache.ragged for n in layer.length)
        theirs = masked_run(llama, chunks, mask, [None, *kept[:-1]])
        full = masked_run(llama, chunks, mask, [None] * len(chunks))
    for row, pad in enumerate([0, 5]):
        ours[0][row, :pad] = theirs[0][row, :pad] = 0
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert max(float((a - b).abs().max()) for a, b in zip(ours, full, strict=True)) > 1e-2
    evictions = [(a[0] & ~b[0][..., : a[0].shape[-1]]).sum() for a, b in pairwise(kept)]
    assert all(n == 2 * 2 for n in evictions), "one entry per row and head and step"


def test_the_buffer_counts(llama: Any) -> None:
    ids, mask = batch(1, 60, [0])
    peak = 0
    with torch.no_grad(), kvbench.attach(llama, "local:buffer=6", 10, moment="decode") as cache:
        step(llama, cache, ids[:, :30], mask, 0)
        for i in range(30, 60):
            step(llama, cache, ids[:, i : i + 1], mask, i)
            held = cache.ragged[0].length
            peak = max(peak, *held)
            newest = cache.kept()[0][0, 0].nonzero().squeeze(-1)
            assert newest.tolist() == list(range(i + 1 - held[0], i + 1))
    assert peak == 15


def test_state_is_restored(llama: Any) -> None:
    ids, mask = batch(1, 20, [0])
    before = llama(ids).logits
    with pytest.raises(RuntimeError, match="boom"), kvbench.attach(llama, "random", 0.5) as cache:
        raise RuntimeError("boom")
    assert llama.config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks for m in llama.modules())
    assert torch.equal(llama(ids).logits, before)
    with kvbench.attach(llama, "random", 0.5), pytest.raises(ValueError, match="this kvbench"):
        step(llama, cache, ids, mask, 0)
    with pytest.raises(ValueError, match="only inside its"):
        step(llama, cache, ids, mask, 0)


def test_other_caches_work_while_attached(llama: Any) -> None:
    ids, mask = batch(2, 20, [0, 4])
    theirs = llama(ids, attention_mask=mask, past_key_values=DynamicCache(config=llama.config))
    with torch.no_grad(), kvbench.attach(llama, "random", 0.5):
        plain = llama(ids, attention_mask=mask, past_key_values=DynamicCache(config=llama.config))
    assert torch.allclose(plain.logits, theirs.logits, atol=1e-6)


def test_misuse_is_refused(llama: Any) -> None:
    ids, mask = batch(2, 20, [0, 4])
    with kvbench.attach(llama, "random", 0.5) as cache:
        with pytest.raises(ValueError, match="nest"), kvbench.attach(llama, "random", 0.5):
            pass
        with pytest.raises(ValueError, match="left"):
            step(llama, cache, ids, mask.flip(1), 0)
    with kvbench.attach(llama, "random", 0.5) as cache, pytest.raises(ValueError, match="beam"):
        llama.generate(ids, past_key_values=cache, num_beams=2, max_new_tokens=3)
    absolute = pytest.raises(ValueError, match="budget in tokens")
    with absolute, kvbench.attach(llama, "random", 0.5, moment="chunked"):
        pass
    with pytest.raises(ValueError, match="policy full"), kvbench.attach(llama, "random", "full", moment="decode"):
        pass
    with pytest.raises(ValueError, match="out of range"):
        kvbench.kept(llama, ids, "random", 1.5)
    with kvbench.attach(llama, "random", 0.5) as cache:
        llama(ids[:, :10], past_key_values=cache)
        with pytest.raises(ValueError, match="columns"):
            llama(ids[:, 10:], attention_mask=mask[:, 10:], past_key_values=cache)


def test_reset_makes_the_cache_fit_for_another_prompt(llama: Any) -> None:
    ids, mask = batch(1, 30, [0])
    other, _ = batch(1, 22, [0], seed=4)
    with torch.no_grad(), kvbench.attach(llama, "snapkv:window=4", 0.3) as cache:
        step(llama, cache, ids, mask, 0)
        cache.reset()
        step(llama, cache, other, mask, 0)
        second = cache.kept()
    alone = kvbench.kept(llama, other, "snapkv:window=4", 0.3)
    assert all(torch.equal(a, b) for a, b in zip(second, alone, strict=True))


def test_extras_start_with_a_prefill_that_is_not_cut(llama: Any) -> None:
    ids, mask = batch(1, 20, [0])
    with torch.no_grad(), kvbench.attach(llama, "h2o", 64, moment="decode") as cache:
        step(llama, cache, ids[:, :19], mask, 0)
        for layer in cache.ragged:
            assert layer.length == [19, 19]
            total = layer.extras[AttentionMass()][layer.rows()].view(2, 19, 4).sum(1)
            assert torch.allclose(total, torch.full((2, 4), 19.0)), "each query has mass 1"
