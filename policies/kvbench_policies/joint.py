"""The global allocator: one top-N over all heads of all layers.

The order is that of `kvbench.parts.order_key` across heads; ties go to the lower layer and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.parts import order_key
from kvbench.plugin import Allocator, Scored, Scores, View
from kvbench_policies.kernels.global_select.op import select_largest


@dataclass(frozen=True)
class Global(Allocator):
    """No allocation: the `N` best entries of the whole cache, all layers and heads together.

    A head may be left with nothing but its protected entries, or with nothing at all.

    Attributes:
        normalise: `none` compares scores as they are; `layer` first standardises the unprotected
            scores of every layer to mean 0 and variance 1.
    """

    name: ClassVar[str] = "global"
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    normalise: Literal["none", "layer"] = "none"

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Count the `total` (int64 `[B]`) best entries of all layers, int64 `[B, L, H]`."""
        keys = [order_key(v, self._comparable(v, scores)) for v, scores in layers]
        longest = max(key.shape[-1] for key in keys)
        for i, key in enumerate(keys):
            if key.shape[-1] < longest:  # at a later cut, layers hold different numbers of entries
                keys[i] = pad(key, (0, longest - key.shape[-1]), value=-1)
        chosen = select_largest(torch.cat(keys, 1), total)
        return chosen.sum(-1).view(len(total), len(layers), -1)

    def _comparable(self, v: View, scores: Scores) -> Scores:
        if self.normalise == "none":
            return scores
        free = v.valid & (scores.protect <= 0)
        count = free.sum((1, 2), keepdim=True).clamp(min=1)
        value = scores.value.float().masked_fill(~free, 0.0)
        centred = (value - value.sum((1, 2), keepdim=True) / count).masked_fill(~free, 0.0)
        spread = (centred.square().sum((1, 2), keepdim=True) / count).sqrt()
        return Scores(centred / spread.clamp(min=torch.finfo(torch.float32).tiny), scores.protect)
