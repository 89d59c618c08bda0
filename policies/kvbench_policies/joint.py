"""Global allocator: one top-N over all heads of all layers.

Entries are ordered by `kvbench.parts.order_key` across heads; ties go to the lower layer and head.
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
    """No per-head budgets: the `N` best entries of the whole cache over all layers and heads.

    A head may keep only its protected entries, or nothing at all.

    Attributes:
        normalise: `none` compares scores as they are; `layer` first standardises the unprotected scores of every layer
            to mean 0 and variance 1.
    """

    name: ClassVar[str] = "global"
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    normalise: Literal["none", "layer"] = "none"

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Count the `total` (int64 `[B]`) best entries of all layers, int64 `[B, L, H]`."""
        rank_keys = [order_key(view, self._comparable(view, scores)) for view, scores in layers]
        longest = max(layer_keys.shape[-1] for layer_keys in rank_keys)
        for layer_index, layer_keys in enumerate(rank_keys):
            # After an eviction step, layers hold different numbers of entries.
            if layer_keys.shape[-1] < longest:
                rank_keys[layer_index] = pad(layer_keys, (0, longest - layer_keys.shape[-1]), value=-1)
        chosen_mask = select_largest(torch.cat(rank_keys, 1), total)
        return chosen_mask.sum(-1).view(len(total), len(layers), -1)

    def _comparable(self, view: View, scores: Scores) -> Scores:
        if self.normalise == "none":
            return scores
        free_mask = view.valid & (scores.protect <= 0)
        free_counts = free_mask.sum((1, 2), keepdim=True).clamp(min=1)
        free_scores = scores.value.float().masked_fill(~free_mask, 0.0)
        centred = (free_scores - free_scores.sum((1, 2), keepdim=True) / free_counts).masked_fill(~free_mask, 0.0)
        deviation = (centred.square().sum((1, 2), keepdim=True) / free_counts).sqrt()
        return Scores(centred / deviation.clamp(min=torch.finfo(torch.float32).tiny), scores.protect)
