"""A forward pass chunk by chunk, over a memory of a fixed size in every layer.

Cai, Tian, Wang, Chen: LoCoCo: Dropping In Convolutions for Long Context Compression, ICML 2024,
arXiv 2406.05317. Before a chunk enters a layer, what the layer holds is cut to the budget; the
chunk attends to what is left and to itself. As in the authors' code, what a chunk leaves behind
carries no gradient, so a loss reaches back over one cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvbench.training.method import Compress


@dataclass
class Held:
    """What a layer holds.

    Attributes:
        key: After RoPE, `[B, H, n, d]`.
        value: `[B, H, n, d]`.
        mass: Attention that every entry has received, mean over the query heads of a KV head,
            float32 `[B, H, n]`.
        valid: Which entries exist, bool `[B, H, n]`.
    """

    key: Tensor
    value: Tensor
    mass: Tensor
    valid: Tensor


class Memory:
    """The memories of all layers during one pass.

    Args:
        compress: Cuts a layer.
        gates: The trained module.
        budget: Entries per head after a cut.
    """

    def __init__(self, compress: Compress, gates: nn.Module, budget: int) -> None:
        self._compress = compress
        self._gates = gates
        self._budget = budget
        self._layers: dict[int, Held] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, scale: float
    ) -> Tensor:
        """Attention of a chunk over the memory and itself; the chunk joins the memory.

        Args:
            layer: Index among the full-attention layers.
            query: `[B, H_q, n, d]`, after RoPE.
            key: `[B, H, n, d]`, after RoPE.
            value: `[B, H, n, d]`.
            valid: Which positions of the chunk are tokens, bool `[B, n]`.
            scale: Factor of the logits.

        Returns:
            `[B, H_q, n, d]`.
        """
        mass = key.new_zeros(key.shape[:3], dtype=torch.float32)
        seen = valid[:, None].expand(mass.shape)
        held = self._layers.get(layer)
        if held is not None:
            before = (held.key, held.value, held.mass, held.valid)
            if held.key.shape[2] > self._budget:
                before = self._compress(self._gates, layer, *before, self._budget)
            key, value = torch.cat([before[0], key], 2), torch.cat([before[1], value], 2)
            mass, seen = torch.cat([before[2], mass], 2), torch.cat([before[3], seen], 2)
        out, received = _attention(query, key, value, seen, scale)
        self._layers[layer] = Held(key.detach(), value.detach(), mass.detach() + received, seen)
        return out


def _attention(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last entries, and what every entry receives of it."""
    heads, new = key.shape[1], query.shape[2]
    grouped = query.unflatten(1, (heads, -1))
    logits = (grouped @ key[:, :, None].transpose(-1, -2)).float() * scale
    column = torch.arange(key.shape[2], device=key.device)
    visible = column <= column[-new:, None]
    mask = visible & valid[:, :, None, None]
    # Not -inf: padding, which sees nothing, would get NaN.
    weight = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
    asks = valid[:, :, None, -new:, None]
    received = (weight.detach() * asks).sum(3).mean(2)
    out = weight.to(value.dtype) @ value[:, :, None]
    return out.flatten(1, 2), received
