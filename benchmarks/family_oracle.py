"""The oracle of `benchmarks/families.py`: the stock model, whose attention masks evicted entries in float64.

It knows nothing of kvbench's attention, caches or modules. Only the kept entries come from kvbench.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from kvbench.engine.models import cache_inputs

ORACLE = "masked-float64"
"""The oracle's name among the attention functions of transformers."""

HIDDEN = -1e30
"""Logit of a masked column. It is finite, so that queries of padding give no NaN."""


class StockCache(DynamicCache):
    """The cache of a stock run, with what the oracle needs.

    Args:
        model: The model.
        kept: By layer, which entries of the context are kept, bool `[B, H, T]`; None where all are.

    Attributes:
        evicted_layers: Layers in which entries were masked.
        weights: Attention weights by layer in the first forward of the oracle, float64 `[B, H_q, T, T]`.
    """

    def __init__(self, model: nn.Module, kept: Sequence[Tensor | None] = ()) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self.kept = kept
        self.evicted_layers: set[int] = set()
        self.weights: dict[int, Tensor] = {}
        self._last_layer = -1
        self._returned_keys: dict[int, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store new keys and values."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._last_layer, self._returned_keys[layer_idx] = layer_idx, keys
        return keys, values

    def layer_of(self, key: Tensor) -> int:
        """Return the layer whose cache a call of attention reads.

        A layer that shares the K/V of another gets that layer's tensor. If keys are expanded from what is cached
        (MLA), the layer is the one that has just stored something.
        """
        for layer_idx, returned_key in self._returned_keys.items():
            if key is returned_key:
                return layer_idx
        return self._last_layer

    @property
    def full_layers(self) -> list[int]:
        """Return the layers that hold attention's keys of all tokens, in order; empty before the first forward."""
        return [layer_idx for layer_idx in sorted(self._returned_keys) if not self.layers[layer_idx].is_sliding]


_running: StockCache | None = None


def masked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Apply softmax attention in float64 without the evicted entries."""
    assert _running is not None
    layer_idx = _running.layer_of(key)
    group = query.shape[1] // key.shape[1]
    expanded_key, expanded_value = (tensor.repeat_interleave(group, 1).double() for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query.double() @ expanded_key.transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    query_count, key_count = logits.shape[-2:]
    if attention_mask is None:
        is_visible = torch.ones(query_count, key_count, dtype=torch.bool).tril(key_count - query_count)
        logits = logits.masked_fill(~is_visible, HIDDEN)
    else:
        logits = (logits + attention_mask[..., :key_count].double()).clamp(min=HIDDEN)
    kept = _running.kept[layer_idx] if layer_idx < len(_running.kept) else None
    if kept is not None and key_count > kept.shape[-1]:
        is_kept = F.pad(kept, (0, key_count - kept.shape[-1]), value=True)
        is_kept = is_kept.repeat_interleave(query.shape[1] // kept.shape[1], 1)
        logits = logits.masked_fill(~is_kept[:, :, None], float("-inf"))
        _running.evicted_layers.add(layer_idx)
    if s_aux is not None:
        sinks = s_aux.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., :key_count]
    _running.weights.setdefault(layer_idx, weights)
    return (weights @ expanded_value).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(ORACLE, masked_attention)
AttentionMaskInterface.register(ORACLE, eager_mask)


@contextmanager
def oracle_attention(model: Any, cache: StockCache) -> Iterator[None]:
    """Use the oracle's attention in a model within the block."""
    global _running
    previous_name = model.config._attn_implementation
    model.set_attn_implementation(ORACLE)
    _running = cache
    try:
        yield
    finally:
        _running = None
        model.set_attn_implementation(previous_name)


@torch.no_grad()
def stock_logits(
    model: Any, chunks: Sequence[Tensor], cache: StockCache, token_mask: Tensor | None = None
) -> list[Tensor]:
    """Return the logits of consecutive chunks of tokens, `[B, n, vocabulary]` each.

    Args:
        model: The model.
        chunks: Token ids, `[B, n]` each; one forward each.
        cache: An empty cache.
        token_mask: Which columns of the first chunk are tokens, not padding on the left, `[B, T]`; None for all.
    """
    chunk_logits = []
    columns = token_mask
    for chunk in chunks:
        arguments: dict[str, Tensor] = {}
        if columns is not None:
            if chunk_logits:
                columns = F.pad(columns, (0, chunk.shape[1]), value=1)
            positions = (columns.cumsum(-1) - 1).clamp(min=0)
            arguments = {"attention_mask": columns, "position_ids": positions[:, -chunk.shape[1] :]}
        outputs = model(input_ids=chunk, **cache_inputs(model, cache), **arguments)
        chunk_logits.append(outputs.logits)
    return chunk_logits


def oracle_logits(
    model: Any, chunks: Sequence[Tensor], cache: StockCache, token_mask: Tensor | None = None
) -> list[Tensor]:
    """Return what `stock_logits` does, with the evicted entries of the first chunk masked in later ones."""
    with oracle_attention(model, cache):
        return stock_logits(model, chunks, cache, token_mask)
