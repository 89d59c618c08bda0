"""Pruned key channels: chosen, stored, read and counted as a slow loop says."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvbench
from kvbench.engine.channels import channel_order, reordered, restored
from kvbench.engine.codes import Coded, Coding
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import NewTokens

from .conftest import _KEPT, SIZE, batch, masked_run, oracle, positions, step
from .test_codes import BATCH, HEADS, a_layer, drawn, of_segment, quantised

WINDOW = 32
"""Queries that choose the channels."""


def kept_channels(query: Tensor, key: Tensor, share: str) -> list[int]:
    """The channels that one KV head keeps.

    Args:
        query: The last queries of its group, `[G, w, d]`.
        key: Its keys, `[n, d]`.
        share: The share of channels that stay.
    """
    d = key.shape[1]
    worth = []
    for channel in range(d):
        lost = 0.0
        for head in query.double():  # the squares of all logits that the channel contributes
            lost += float(torch.outer(head[:, channel], key[:, channel].double()).square().sum())
        worth.append(lost)
    dropped = math.floor(d * (1 - Fraction(share)))
    order = sorted(range(d), key=lambda channel: (worth[channel], -channel))
    return sorted(order[dropped:])


def pruned(query: Tensor, key: Tensor, kept: Tensor, share: str, residual: int) -> Tensor:
    """The keys of one sequence `[H, n, d]` with zeros where channels are pruned.

    Args:
        query: All its queries, `[H_q, n, d]`.
        key: Its keys, `[H, n, d]`.
        kept: What is held, bool `[H, n]`.
        share: The share of channels that stay.
        residual: Newest held keys of a head that stay whole.
    """
    out = key.clone()
    group = len(query) // len(key)
    for head in range(len(key)):
        own = query[head * group : (head + 1) * group, -WINDOW:]
        held = [i for i in range(key.shape[1]) if kept[head, i]]
        stay = kept_channels(own, key[head, held], share)
        for i in held[: max(0, len(held) - residual)]:
            for channel in set(range(key.shape[2])) - set(stay):
                out[head, i, channel] = 0
    return out


# --- choosing and storing -------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("kept", [1, 7, 12])
def test_channels_are_those_of_the_loop(group: int, kept: int) -> None:
    g = torch.Generator().manual_seed(group)
    key = torch.randn(3, 2, 17, 12, generator=g)
    query = torch.randn(3, 2 * group, 5, 12, generator=g)
    query[1, :, :3] = 0  # a short sequence
    keep = torch.rand(3, 2, 17, generator=g) < 0.6
    order = channel_order(query, key, keep, kept)
    assert order.dtype == torch.uint8
    for row in range(3):
        for head in range(2):
            own = query[row, head * group : (head + 1) * group]
            right = kept_channels(own, key[row, head, keep[row, head]], f"{kept}/12")
            found = order[row, head].tolist()
            assert found[:kept] == right
            assert sorted(found) == list(range(12))
    assert torch.equal(restored(reordered(query, order), order), query)


def packed(coding: Coding, dim: int, order: Tensor) -> RaggedLayer:
    key, value, keep = drawn(45, dim)
    layer = a_layer(coding, dim)
    layer.order = order
    layer.pack(reordered(key, order), value, keep, torch.arange(45).expand(keep.shape), {})
    return layer


@pytest.mark.parametrize("dim", [16, 12, 5])
@pytest.mark.parametrize("coding", [Coding(None, 8, 5, 0.6), Coding(4, 8, 5, 0.6), Coding(2, 4, 0, 0.1)], ids=str)
def test_a_head_holds_its_channels_in_the_bytes_of_the_loop(coding: Coding, dim: int) -> None:
    key, value, keep = drawn(45, dim)
    width = dim - math.floor(dim * (1 - Fraction(str(coding.key_channels))))
    g = torch.Generator().manual_seed(3)
    order = channel_order(torch.randn(BATCH, 2 * HEADS, 9, dim, generator=g), key, keep, width)
    layer = packed(coding, dim, order)
    rows, live = layer.padded_rows()
    keys, values = layer.read(rows)
    bits = 32 * 2 * dim
    for s in range(BATCH * HEADS):
        row, head = divmod(s, HEADS)
        own = key[row, head, keep[row, head]].clone()
        own_value = value[row, head, keep[row, head]]
        old = max(0, len(own) - coding.residual)
        old -= old % (coding.group_size if coding.bits else 1)
        channels = order[row, head, :width].tolist()
        thin = own[:, channels]
        if coding.bits is not None:
            thin = torch.from_numpy(quantised(thin.numpy(), thin.numpy(), coding)[0])
            number = own_value.numpy()
            own_value = torch.from_numpy(quantised(number, number, coding)[1])
        own[:old] = 0
        own[:old, channels] = thin[:old]
        torch.testing.assert_close(keys[row, head][live[row, head]], own, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[row, head][live[row, head]], own_value)
    taken = 0
    for length in layer.length:
        old = coding.coded(length)
        taken += (length - old) * bits + 8 * dim  # the order of the channels: a byte each
        if coding.bits is None:
            taken += old * (width + dim) * 32
            continue
        for channels, blocks in ((width, width / coding.group_size), (dim, 0.0)):
            blocks = blocks or dim / coding.channels(dim)
            taken += old * (8 * math.ceil(channels * coding.bits / 8)) + round(old * blocks) * 64
    assert layer.live_bytes() * 8 == taken
    assert layer.live_bytes(0) + layer.live_bytes(1) == layer.live_bytes()
    assert isinstance(layer.key, Coded)
    assert layer.key.exact.shape == (sum(layer.length) - sum(layer.coded), dim)
    assert layer.key.zero.shape[1] == width


def test_all_channels_are_the_keys_as_they_are() -> None:
    key, _, keep = drawn(45)
    layer = packed(Coding(None, 8, 0, 1.0), 16, torch.arange(16, dtype=torch.uint8).expand(2, 3, 16))
    for s in range(BATCH * HEADS):
        row, head = divmod(s, HEADS)
        own = key[row, head, keep[row, head]].numpy()
        assert (of_segment(layer, layer.key, s) == own).all()


def test_a_cut_prunes_what_it_cuts_and_nothing_else() -> None:
    key, _, keep = drawn(45)
    order = channel_order(key, key, keep, 10)
    layer = packed(Coding(None, 8, 5, 0.6), 16, order)
    new = torch.ones(BATCH, HEADS, 16, 16)
    layer.pending = (new, new)
    layer.append(NewTokens.everywhere(BATCH, 16, 45, new.device))
    assert layer.coded == [n - 21 for n in layer.length]
    before = layer.live_bytes(1)
    keep = layer.padded_rows()[1].clone()
    keep[0, :, ::2] = False
    layer.evict(keep, [0])
    assert layer.coded[:HEADS] == [n - 5 for n in layer.length[:HEADS]]
    assert layer.coded[HEADS:] == [n - 21 for n in layer.length[HEADS:]]
    assert layer.live_bytes(1) == before
    rows, live = layer.padded_rows()
    shown = layer.read(rows)[0]
    for head in range(HEADS):
        own = shown[0, head][live[0, head]]
        assert bool((own[-5:] == 1).all())
        newly = own[-7:-5]  # appended later, pruned by this cut
        assert sorted(newly[0].nonzero()[:, 0].tolist()) == sorted(order[0, head, :10].tolist())
        assert bool((shown[1, head][live[1, head]][-16:] == 1).all())


# --- models ---------------------------------------------------------------------------------------

_QUERIES: dict[int, Tensor] = {}


def _noting(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    _QUERIES[module.layer_idx] = query
    return sdpa_attention_forward(module, query, *args, **kwargs)


AttentionInterface.register("noting", _noting)
AttentionMaskInterface.register("noting", sdpa_mask)


@contextmanager
def noting(model: Any) -> Iterator[None]:
    """Note the queries of the forwards of a model, layer by layer."""
    model.set_attn_implementation("noting")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@functools.cache
def llama_of(heads: int) -> Any:
    """A random Llama of 8 query heads on so many KV heads."""
    torch.manual_seed(7)
    config = LlamaConfig(**{**SIZE, "num_key_value_heads": heads, "num_hidden_layers": 2})
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@torch.no_grad()
def right_logits(model: Any, ids: Tensor, context: int, kept: list[Tensor], share: str, residual: int) -> Tensor:
    """Logits behind the context of one sequence `[1, T]`, whose context's keys are pruned."""
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    with noting(model):
        step(model, cache, ids[:, :context], mask, 0)
    for layer, held in enumerate(kept):
        stored = cache.layers[layer]
        stored.keys = pruned(_QUERIES[layer][0], stored.keys[0], held, share, residual)[None]
    with oracle(model):
        _KEPT.update({i: held[None] for i, held in enumerate(kept)})
        last = ids.shape[1]
        logits: Tensor = model(
            input_ids=ids[:, context:],
            attention_mask=mask,
            position_ids=positions(mask, context, last),
            past_key_values=cache,
            use_cache=True,
        ).logits
    return logits


CASES = [
    ("full", "full", 32),
    ("full", "full", 0),
    ("snapkv:window=4:kernel=3", "13", 3),
    ("snapkv:window=4:kernel=3", "1", 0),
    ("keydiff:allocate=head_adaptive", "0.4", 2),
    ("knorm", "1.0", 5),
]


@pytest.mark.parametrize("heads", [8, 4, 2], ids=["G1", "G2", "G4"])
@pytest.mark.parametrize(("spec", "budget", "residual"), CASES)
@torch.no_grad()
def test_logits_are_those_of_a_full_cache_with_zeroed_channels(
    spec: str, budget: str, residual: int, heads: int
) -> None:
    model, context, share = llama_of(heads), 37, "0.6"
    pads = [0, 6, 29]
    ids, mask = batch(3, context + 4, pads)
    pruned_spec = f"{spec}:key_channels={share}:residual={residual}"
    with kvbench.attach(model, pruned_spec, budget) as cache:
        step(model, cache, ids[:, :context], mask, 0)
        kept, live = cache.kept(), [cache.live_bytes(row) for row in range(3)]
        found = step(model, cache, ids[:, context:], mask, context)
    plain = kvbench.kept(model, ids[:, :context], spec, budget, mask[:, :context])
    for row, pad in enumerate(pads):
        own = ids[row : row + 1, pad:]
        held = [m[row, :, pad:] for m in kept if m is not None]
        assert all(torch.equal(a, b[row, :, pad:]) for a, b in zip(held, plain, strict=True) if b is not None)
        right = right_logits(model, own, context - pad, held, share, residual)
        torch.testing.assert_close(found[row : row + 1], right, rtol=1e-4, atol=1e-4)
        with kvbench.attach(model, pruned_spec, budget) as alone:
            step(model, alone, own[:, : context - pad], torch.ones_like(own), 0)
            assert alone.live_bytes() == live[row]


@pytest.mark.parametrize("length", [1, 2, 33, 63])
@torch.no_grad()
def test_odd_lengths_and_bytes(length: int) -> None:
    model = llama_of(2)
    ids, mask = batch(1, length + 1, [0])
    with kvbench.attach(model, "full:key_channels=0.6", "full") as cache:
        step(model, cache, ids[:, :length], mask, 0)
        old = max(0, length - 32)
        # d = 8: 5 of 8 channels stay, and a head's order takes 8 bytes.
        expected = 4 * (old * (5 + 8) * 4 + (length - old) * 64 + 8)
        assert cache.live_bytes() == expected
        assert bool(step(model, cache, ids[:, length:], mask, length).isfinite().all())
        assert cache.live_bytes() == expected + 4 * 64


@pytest.mark.parametrize("spec", ["h2o:buffer=2:residual=4", "d2o:buffer=2:residual=4:bits=8:group_size=4"])
@pytest.mark.parametrize("moment", ["decode", "chunked", "turns"])
@torch.no_grad()
def test_budgets_hold_and_channels_stay_at_every_moment(moment: Any, spec: str) -> None:
    model, (ids, mask) = llama_of(2), batch(2, 60, [0, 17])
    with kvbench.attach(model, f"{spec}:key_channels=0.5", 13, moment=moment) as cache:
        orders: list[Any] = []
        for first in range(0, 60, 20):
            logits = step(model, cache, ids[:, first : first + 20], mask, first)
            if moment == "turns":
                cache.compress()
            assert bool(logits[:, -1].isfinite().all())
            for row, pad in enumerate((0, 17)):
                assert cache.live_entries(row) == 4 * min(first + 20 - pad, 13)
            orders.append([layer.order.tolist() for layer in cache.ragged])  # type: ignore[union-attr]
        assert orders[0] == orders[1] == orders[2]
        for layer in cache.ragged:
            assert isinstance(layer.key, Coded)
            rows, live = layer.padded_rows()
            zeros = (layer.read(rows)[0][live] == 0).sum(-1)
            assert sorted(set(zeros.tolist())) == [0, 4]
            assert int((zeros == 4).sum()) >= sum(layer.coded) > 0


@torch.no_grad()
def test_without_a_pruned_channel_nothing_changes() -> None:
    model, (ids, mask) = llama_of(2), batch(2, 40, [0, 9])
    chunks = [ids[:, :36], ids[:, 36:]]
    with kvbench.attach(model, "full:key_channels=0.99:residual=0", "full") as cache:
        found = [step(model, cache, part, mask, first) for part, first in zip(chunks, (0, 36), strict=True)]
    for a, b in zip(found, masked_run(model, chunks, mask, [None, None]), strict=True):
        torch.testing.assert_close(a[:, -4:], b[:, -4:], rtol=1e-4, atol=1e-4)
