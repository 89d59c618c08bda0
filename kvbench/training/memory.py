"""Chunked forward pass with a fixed-size memory in every layer.

Cai, Tian, Wang, Chen: LoCoCo: Dropping In Convolutions for Long Context Compression, ICML 2024, arXiv 2406.05317.
Before a chunk enters a layer, the layer's memory is compressed to the budget; the chunk attends to the memory and to
itself. As in the authors' code, entries left by a chunk carry no gradient, so a loss reaches back over one eviction
step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.training.method import Compress
from kvbench.view.softmax import attention_weights, capped


@dataclass
class LayerMemory:
    """Entries held by a layer.

    Attributes:
        key: After RoPE, `[B, H, n, d]`.
        value: `[B, H, n, d]`.
        attention_sums: Accumulated attention per entry, mean over the query heads of a KV head, float32 `[B, H, n]`.
        valid: Entries that exist, bool `[B, H, n]`.
    """

    key: Tensor
    value: Tensor
    attention_sums: Tensor
    valid: Tensor


class TrainingMemory:
    """Memories of all layers during one pass.

    Args:
        compress: Compresses a layer.
        gates: The trained module.
        budget: Entries per head after compression.
    """

    def __init__(self, compress: Compress, gates: nn.Module, budget: int) -> None:
        self._compress = compress
        self._gates = gates
        self._budget = budget
        self._layers: dict[int, LayerMemory] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, scale: float) -> Tensor:
        """Compute a chunk's attention over the memory and itself, and add the chunk to the memory.

        Args:
            layer: Index among the full-attention layers.
            query: `[B, H_q, n, d]`, after RoPE.
            key: `[B, H, n, d]`, after RoPE.
            value: `[B, H, n, d]`.
            valid: Positions of the chunk that are tokens, bool `[B, n]`.
            scale: Factor of the logits; see `LogitScale`.

        Returns:
            `[B, H_q, n, d]`.
        """
        attention_sums = key.new_zeros(key.shape[:3], dtype=torch.float32)
        entry_mask = valid[:, None].expand(attention_sums.shape)
        memory = self._layers.get(layer)
        if memory is not None:
            remembered = (memory.key, memory.value, memory.attention_sums, memory.valid)
            if memory.key.shape[2] > self._budget:
                remembered = self._compress(self._gates, layer, *remembered, self._budget)
            key, value = torch.cat([remembered[0], key], 2), torch.cat([remembered[1], value], 2)
            attention_sums, entry_mask = (
                torch.cat([remembered[2], attention_sums], 2),
                torch.cat([remembered[3], entry_mask], 2),
            )
        output, received = _attention(query, key, value, entry_mask, scale)
        self._layers[layer] = LayerMemory(key.detach(), value.detach(), attention_sums.detach() + received, entry_mask)
        return output


def _attention(query: Tensor, key: Tensor, value: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the causal attention of the last entries, and the attention received by every entry."""
    kv_heads, query_count = key.shape[1], query.shape[2]
    grouped_query = query.unflatten(1, (kv_heads, -1))
    logits = capped((grouped_query @ key[:, :, None].transpose(-1, -2)).float() * scale, scale)
    columns = torch.arange(key.shape[2], device=key.device)
    causal_mask = columns <= columns[-query_count:, None]
    attention_mask = causal_mask & valid[:, :, None, None]
    # Not -inf, which gives NaN for padding, whose row is fully masked.
    attention = attention_weights(logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min), scale)
    query_mask = valid[:, :, None, -query_count:, None]
    received = (attention.detach() * query_mask).sum(3).mean(2)
    output = attention.to(value.dtype) @ value[:, :, None]
    return output.flatten(1, 2), received
