"""One top-N over several heads at once, and the global allocator that is made of it.

The order is that of `kvbench.parts.rank_entries`, carried across heads: protected entries first, by
class and then recency; the others by value, ties to the more recent token, then to the lower layer
and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.plugin import Allocator, Scored, Scores, View


def order_key(v: View, scores: Scores) -> Tensor:
    """Give every entry one integer that is larger the more it is worth keeping.

    From the top: one bit whether it is protected; 32 bits of its class, or of its float32 value
    turned so that they compare as integers; 30 bits of its position.

    Returns:
        int64 `[B, H, n]`; -1 where there is no entry.
    """
    bits = (scores.value.float() + 0.0).view(torch.int32).long()  # + 0.0: no negative zero
    value = torch.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits) + (1 << 31)
    classes = scores.protect.long()
    worth = torch.where(classes > 0, (1 << 32) + classes, value)
    return ((worth << 30) + v.position).masked_fill(~v.valid, -1)


def largest(key: Tensor, count: Tensor) -> Tensor:
    """Mark the `count` (int64 `[B]`) largest of every row of `key` `[B, m]`, ties to the first."""
    order = key.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.arange(key.shape[-1], device=key.device) < count[:, None]
    return torch.zeros_like(chosen).scatter_(-1, order, chosen)


@dataclass(frozen=True)
class Global(Allocator):
    """No allocation: the `N` best entries of the whole cache, all layers and heads together.

    A head may be left with nothing, except for what its score protects.

    Attributes:
        normalise: `none` compares scores as they are; `layer` first standardises the unprotected
            scores of every layer to mean 0 and variance 1.
    """

    name: ClassVar[str] = "global"
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    normalise: Literal["none", "layer"] = "none"

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Count the `total` (int64 `[B]`) best entries of all layers, int64 `[B, L, H]`."""
        keys = [order_key(v, self._comparable(v, scores)).flatten(1) for v, scores in layers]
        chosen = largest(torch.cat(keys, 1), total).split([k.shape[1] for k in keys], 1)
        counts = [mine.view(v.shape).sum(-1) for mine, (v, _) in zip(chosen, layers, strict=True)]
        return torch.stack(counts, 1)

    def _comparable(self, v: View, scores: Scores) -> Scores:
        if self.normalise == "none":
            return scores
        free = v.valid & (scores.protect <= 0)
        count = free.sum((1, 2), keepdim=True).clamp(min=1)
        value = scores.value.float().masked_fill(~free, 0.0)
        centred = (value - value.sum((1, 2), keepdim=True) / count).masked_fill(~free, 0.0)
        spread = (centred.square().sum((1, 2), keepdim=True) / count).sqrt()
        return Scores(centred / spread.clamp(min=torch.finfo(torch.float32).tiny), scores.protect)
