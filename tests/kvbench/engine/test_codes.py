"""Quantised caches hold what a slow loop over groups says, in the bytes that they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.engine.codes import Coded, Coding
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import NewTokens

from .conftest import batch, build, step

BATCH, HEADS = 2, 3


def rounded(numbers: np.ndarray, bits: int) -> np.ndarray:
    """One group: the nearest of `2 ** bits` even steps from its smallest to its largest number."""
    low = np.float32(numbers.min())
    size = np.float32((np.float32(numbers.max()) - low) / np.float32(2**bits - 1))
    out = np.empty_like(numbers)
    for at, number in np.ndenumerate(numbers):
        code = 0 if size == 0 else min(round(float((number - low) / size)), 2**bits - 1)
        out[at] = low + np.float32(code) * size
    return out


def quantised(key: np.ndarray, value: np.ndarray, coding: Coding) -> tuple[np.ndarray, np.ndarray, int]:
    """Keys and values `[n, d]` of one head as they are read back, and the bytes that they take."""
    key, value = key.copy(), value.copy()
    n, d = key.shape
    g, held = coding.group_size, 0
    first = 0
    while first + g <= n - coding.residual:
        for channel in range(d):
            key[first : first + g, channel] = rounded(key[first : first + g, channel], coding.bits)
            held += g * coding.bits + 2 * 32
        for entry in range(first, first + g):
            width = g if d % g == 0 else d
            for block in range(0, d, width):
                part = slice(block, block + width)
                value[entry, part] = rounded(value[entry, part], coding.bits)
                held += width * coding.bits + 2 * 32
        first += g
    held += (n - first) * 2 * d * 32
    return key, value, held // 8


def a_layer(coding: Coding | None, dim: int = 16) -> RaggedLayer:
    layer = RaggedLayer()
    layer.coding, layer.dim = coding, dim
    layer.device, layer.dtype = torch.device("cpu"), torch.float32
    return layer


def drawn(tokens: int, dim: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (BATCH, HEADS, tokens, dim)
    keep = torch.rand(shape[:3], generator=g) < torch.linspace(0.2, 1, HEADS)[:, None]
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g) * 3, keep


def packed(coding: Coding, tokens: int = 45, dim: int = 16) -> RaggedLayer:
    key, value, keep = drawn(tokens, dim)
    layer = a_layer(coding, dim)
    layer.pack(key, value, keep, torch.arange(tokens).expand(keep.shape), {})
    return layer


def of_segment(layer: RaggedLayer, x: Any, s: int) -> np.ndarray:
    out: np.ndarray = x.decode()[layer.start[s] : layer.start[s] + layer.length[s]].numpy()
    return out


@pytest.mark.parametrize("dim", [16, 12, 4])
@pytest.mark.parametrize("coding", [Coding(2, 8, 0), Coding(4, 8, 5), Coding(8, 4, 30)], ids=str)
def test_a_head_is_quantised_as_the_loop_says(coding: Coding, dim: int) -> None:
    key, value, keep = drawn(45, dim)
    layer = packed(coding, dim=dim)
    taken = 0
    for s in range(BATCH * HEADS):
        row, head = divmod(s, HEADS)
        own = keep[row, head]
        expected = quantised(key[row, head, own].numpy(), value[row, head, own].numpy(), coding)
        for x, right in zip((layer.key, layer.value), expected, strict=False):
            np.testing.assert_allclose(of_segment(layer, x, s), right, rtol=1e-6, atol=1e-6)
        taken += expected[2]
    assert layer.live_bytes() == taken
    assert layer.live_bytes(0) + layer.live_bytes(1) == taken
    assert isinstance(layer.key, Coded)
    assert isinstance(layer.value, Coded)
    # What is really allocated: codes of all rows, what the loop counts, and 4 bytes for a place.
    codes = len(layer.col) * dim * coding.bits // 8
    coded = sum(map(coding.coded, layer.length)) * dim * coding.bits // 8
    spare = 2 * (codes - coded + 4 * len(layer.col)) + 8 * (dim + dim // coding.channels(dim))
    assert layer.key.owned_bytes + layer.value.owned_bytes == taken + spare


def test_equal_numbers_come_back_as_they_are() -> None:
    layer, same = a_layer(Coding(2, 4, 0)), torch.full((1, 1, 8, 16), 1.7)
    layer.pack(same, same, same[..., 0] > 0, torch.arange(8).expand(1, 1, 8), {})
    for x in (layer.key, layer.value):
        assert np.array_equal(of_segment(layer, x, 0), same[0, 0].numpy())


@pytest.mark.parametrize("steps", [[1] * 30, [30], [7, 1, 22]], ids=str)
def test_appended_entries_are_quantised_when_they_leave_the_residual(steps: Sequence[int]) -> None:
    coding, total = Coding(4, 8, 5), 45
    key, value, keep = drawn(total)
    first = total - sum(steps)
    keep[:, :, first:] = torch.tensor([True, False])[:, None, None]  # the second sequence waits
    keep[1, :, -4:] = True
    columns = torch.arange(total).expand(keep.shape)
    whole, grown = a_layer(coding), a_layer(coding)
    whole.pack(key, value, keep, columns, {})
    part = slice(0, first)
    grown.pack(key[:, :, part], value[:, :, part], keep[:, :, part], columns[:, :, part], {})
    for n in steps:
        new = slice(first, first + n)
        grown.pending = (key[:, :, new], value[:, :, new])
        grown.append(NewTokens.where(keep[:, 0, new], first))
        coding.age(grown)
        first += n
    assert grown.length == whole.length
    assert grown.live_bytes() == whole.live_bytes()
    for s in range(BATCH * HEADS):
        for a, b in ((grown.key, whole.key), (grown.value, whole.value)):
            assert np.array_equal(of_segment(grown, a, s), of_segment(whole, b, s))


def test_a_cut_leaves_the_codes_of_other_sequences_alone() -> None:
    layer = packed(Coding(2, 4, 2))
    before = [of_segment(layer, layer.key, s) for s in range(BATCH * HEADS)]
    keep = layer.padded_rows()[1].clone()
    keep[0, :, ::2] = False
    layer.evict(keep, [0])
    for s in range(HEADS, 2 * HEADS):
        assert np.array_equal(of_segment(layer, layer.key, s), before[s])
    for s in range(HEADS):
        key = before[s][keep[0, s, : len(before[s])].numpy()]
        expected = quantised(key, key, Coding(2, 4, 2))[0]
        np.testing.assert_allclose(of_segment(layer, layer.key, s), expected, rtol=1e-5, atol=1e-5)


def test_a_fork_grows_on_its_own() -> None:
    layer = packed(Coding(4, 4, 2))
    before = [of_segment(layer, layer.key, s) for s in range(BATCH * HEADS)]
    other = layer.fork()
    new = torch.ones(BATCH, HEADS, 9, 16)
    other.pending = (new, new)
    other.append(NewTokens.everywhere(BATCH, 9, 45, new.device))
    Coding(4, 4, 2).age(other)
    assert [of_segment(layer, layer.key, s).tolist() for s in range(BATCH * HEADS)] == [x.tolist() for x in before]


def test_a_part_of_the_rows_stays_coded_and_reads_like_a_tensor() -> None:
    layer = packed(Coding(4, 4, 2))
    assert isinstance(layer.key, Coded)
    one, whole = layer.sequence(1), layer.key.decode()
    assert isinstance(one.key, Coded)
    first = layer.start[HEADS]
    own = whole[first : first + len(one.col)]
    assert torch.equal(one.key.view(1, -1, 16)[0], own)
    assert torch.equal(one.key @ torch.eye(16), own)
    assert torch.equal(torch.cat([one.key, layer.key]).decode(), torch.cat([own, whole]))


def test_nothing_writes_past_the_codes() -> None:
    layer = packed(Coding(4, 4, 2))
    assert layer.key is not None
    with pytest.raises(TypeError, match="cannot write"):
        layer.key.add_(1.0)


SPECS = ["full:bits=4", "full:bits=2:group_size=4", "snapkv:window=4:bits=8", "d2o:bits=4"]


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_attention_sees_the_decoded_numbers(spec: str) -> None:
    model = build("llama")
    ids, mask = batch(2, 40, [0, 9])
    spec += ":residual=3"
    with kvbench.attach(model, spec, 20) as cache, torch.inference_mode():
        step(model, cache, ids[:, :36], mask, 0)
        decoded = [(x.key.decode(), x.value.decode()) for x in cache.ragged]  # type: ignore[union-attr]
        with_codes = step(model, cache, ids[:, 36:], mask, 36)
    plain = spec.partition(":bits")[0]
    with kvbench.attach(model, plain, 20) as cache:
        step(model, cache, ids[:, :36], mask, 0)
        for layer, (key, value) in zip(cache.ragged, decoded, strict=True):
            layer.key, layer.value = key.clone(), value.clone()
        layer_bytes = cache.live_bytes()
        expected = step(model, cache, ids[:, 36:], mask, 36)
    torch.testing.assert_close(with_codes, expected, rtol=1e-4, atol=1e-4)
    assert sum(x.numel() for x, _ in decoded) * 4 < layer_bytes


@pytest.mark.parametrize("moment", ["decode", "chunked", "turns"])
@torch.no_grad()
def test_budgets_hold_at_every_moment(moment: Any) -> None:
    model, (ids, mask) = build("llama"), batch(2, 60, [0, 17])
    spec = "h2o:buffer=2:bits=4:group_size=4:residual=4"
    with kvbench.attach(model, spec, 13, moment=moment) as cache:
        for first in range(0, 60, 20):
            logits = step(model, cache, ids[:, first : first + 20], mask, first)
            if moment == "turns":
                cache.compress()
            assert bool(logits[:, -1].isfinite().all())
            for row, pad in enumerate((0, 17)):
                assert cache.live_entries(row) == 6 * min(first + 20 - pad, 13)
        assert all(isinstance(layer.key, Coded) for layer in cache.ragged)
