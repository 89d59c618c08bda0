"""Causal attention in blocks agrees with its definition in float64, and a sequence does not depend on its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench import native
from kvbench.engine import dense
from kvbench.engine.dense import causal_attention, dense_attention

SCALE = 0.3


@pytest.fixture(autouse=True)
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "can_attend_causally", lambda *_: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def inputs(batch: int, kv_heads: int, group: int, tokens: int, dims: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(batch + 3 * kv_heads + 5 * group + tokens + sum(dims))
    query = torch.randn(batch, tokens, kv_heads * group, dims[0]).transpose(1, 2)  # as models hand it over
    return query, torch.randn(batch, kv_heads, tokens, dims[0]), torch.randn(batch, kv_heads, tokens, dims[1])


def weights_of(query: Tensor, key: Tensor) -> Tensor:
    """Attention weights in float64, `[B, H_q, n, n]`."""
    logits = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT * SCALE
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 200])
@pytest.mark.parametrize(("batch", "kv_heads", "dims"), [(1, 2, (32, 32)), (3, 1, (16, 24)), (2, 3, (16, 16))])
def test_blocks_agree_with_the_definition(
    batch: int, kv_heads: int, dims: tuple[int, int], tokens: int, group: int
) -> None:
    query, key, value = inputs(batch, kv_heads, group, tokens, dims)
    output, sums, window_sums = causal_attention(query, key, value, SCALE, (1, 2))
    weights = weights_of(query, key)
    torch.testing.assert_close(output.double(), weights @ value.double().repeat_interleave(group, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(sums[1].double(), weights.sum(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums[2].double(), weights.square().sum(2), rtol=1e-5, atol=1e-5)
    alone, none, _ = causal_attention(query[:1], key[:1], value[:1], SCALE)
    assert torch.equal(alone, output[:1]) and none == {} and window_sums is None


@pytest.mark.parametrize("reason", ["length", "threads", "dtype", "gradient"])
def test_sdpa_attends_where_blocks_are_slower(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs(1, 2, 2, 70, (16, 16))
    if reason == "length":
        monkeypatch.setattr(dense, "_KEYS_PER_CHANNEL", 4 * 70 // 16)
    elif reason == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    elif reason == "dtype":
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    else:
        key.requires_grad_()
    monkeypatch.setattr(dense, "_attend_in_blocks", None)
    output, sums, window_sums = causal_attention(query, key, value, SCALE, (1,))
    assert torch.equal(output, dense_attention(query, key, value, None, SCALE, is_causal=True)) and sums == {}
    assert window_sums is None
