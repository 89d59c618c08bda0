"""D2O's layer budgets: layers with more even attention keep more.

Wan, Wu, Zhang and others: D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
Models, arXiv 2406.13035, section 4.1, equations 4 and 5, and the alternatives of Table 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import BudgetRefused, UserError
from kvbench.parts import largest_remainder, water_fill
from kvbench.plugin import Allocator, AttentionMass, Need, Scored
from kvbench_policies.layer_shares import held_before

_LEAST_VARIANCE = 1e-12
"""Lower bound of a variance before its reciprocal is taken."""


def fill_logs(logits: Tensor, total_entries: Tensor, upper_bounds: Tensor, lower_bounds: Tensor) -> Tensor:
    """Distribute totals in proportion to `exp(logits)` within bounds, without rounding.

    The excess of a share at its bound goes to the others in proportion to their weights. Weights are scaled by the
    largest one that is not at its bound, so they may differ by any number of orders of magnitude.

    Args:
        logits: Logarithms of the weights, finite float64 `[B, K]`.
        total_entries: int64 `[B]`, between the sums of `lower_bounds` and `upper_bounds`.
        upper_bounds: Upper bounds, int64 `[B, K]`.
        lower_bounds: Lower bounds, int64 `[B, K]`, at most `upper_bounds`.

    Returns:
        float64 `[B, K]` summing to `total_entries` (up to rounding).
    """

    def proportional(remaining: Tensor, fixed_mask: Tensor) -> Tensor:
        return remaining * torch.softmax(logits.masked_fill(fixed_mask, float("-inf")), -1)

    return water_fill(proportional, total_entries, upper_bounds.double(), lower_bounds.double())


@dataclass(frozen=True)
class InverseVariance(Allocator):
    """Layers share the budget by the variance of the attention that their entries received.

        F_l = mean_h Var_i( sum_q A_{l,h}[q, i] ),    layer l gets exp(-F_l) / sum_m exp(-F_m)

    `h` runs over the layer's query heads, as in the authors' code. All KV heads of a layer get the same budget, clipped
    to `[max(1, floor(0.01 T)), T]` (the minimum is at most the mean budget `b`). The excess goes to the other layers in
    proportion to their weights. Budgets are rounded by largest remainder; ties go to the lower layer and head.

    `F` is measured during the prefill: at moment `decode`, a cache that was compressed before keeps its per-head
    budgets. At `chunked` and `turns`, where new context follows, every eviction step measures `F` again from the held
    entries.

    Attributes:
        scale: `release` (the authors' code) scales the variances of a layer's heads to `(x - min) / (max - min + 1e-6)`
            before the mean over heads, so that `F` is in [0, 1]. `raw` follows the equation; at realistic lengths, one
            layer then takes nearly everything. `standardized` subtracts from `F` its mean over layers and divides by
            its standard deviation.
        share: `inverse_variance`; `reciprocal` (`1 / F_l`) and `uniform` from the paper's Table 4; or kvbench's own
            `layer_decay`, `exp(-l / L)` (the paper gives no formula for its exponential decay).
        heads: `query` uses the variance of every query head's attention, `kv` that of the mean over the query heads of
            a KV head (with two KV heads and `scale=release`, `F` is then 1/2 in all layers).
        variant: `paper`, or `release` (the authors' code): the first two layers and the last keep everything (at
            `decode` they grow with the text); the others divide the rest of the budget.
    """

    name: ClassVar[str] = "inverse_variance"
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    scale: Literal["release", "raw", "standardized"] = "release"
    share: Literal["inverse_variance", "reciprocal", "uniform", "layer_decay"] = "inverse_variance"
    heads: Literal["query", "kv"] = "query"
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        """Reject the reciprocal of values around 0."""
        if self.share == "reciprocal" and self.scale == "standardized":
            raise UserError(
                "share=reciprocal cannot use scale=standardized, whose variances may be negative; "
                "use scale=release or scale=raw"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """Accumulated attention per entry."""
        return frozenset({AttentionMass()})

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Distribute a total (int64 `[B]`) over the heads of all layers, int64 `[B, L, H]`.

        Raises:
            BudgetRefused: The layers that `variant=release` keeps in full leave too little for the others.
        """
        view = layers[0].view
        layer_count, head_count = len(layers), view.model.kv_heads
        entry_counts = torch.stack([layer.view.valid.sum(-1) for layer in layers], 1)
        full_layers = self._whole(layer_count, total.device)
        remaining = total - (entry_counts * full_layers[:, None]).sum((1, 2))
        other_heads = head_count * int((~full_layers).sum())
        self._check(remaining, other_heads, total, full_layers, layer_count * head_count)
        log_weights = self._logs(layers)[:, :, None].expand_as(entry_counts)
        previous_counts, stay_mask = held_before(layers, total)
        log_weights = torch.where(stay_mask[:, None, None], previous_counts.log(), log_weights)
        minimum = torch.where(stay_mask, 1, (view.length // 100).clamp(min=1))
        floors = torch.minimum(minimum, remaining // max(1, other_heads))[:, None, None]
        lower_bounds = torch.minimum(torch.where(full_layers[:, None], entry_counts, floors), entry_counts).flatten(1)
        upper_bounds = entry_counts.flatten(1)
        exact_shares = fill_logs(log_weights.flatten(1), total, upper_bounds, lower_bounds)
        return largest_remainder(exact_shares, total, upper_bounds, lower_bounds).view(entry_counts.shape)

    def _whole(self, layer_count: int, device: torch.device) -> Tensor:
        """Return the layers that keep everything, bool `[L]`."""
        layer_indices = torch.arange(layer_count, device=device)
        if self.variant == "paper":
            return torch.zeros_like(layer_indices, dtype=torch.bool)
        return (layer_indices < 2) | (layer_indices == layer_count - 1)

    def _check(
        self,
        remaining: Tensor,
        other_heads: int,
        total_budget: Tensor,
        full_layers: Tensor,
        head_total: int,
    ) -> None:
        if self.variant == "paper":
            return
        is_short = remaining < other_heads if other_heads else remaining != 0
        if not bool(is_short.any()):
            return
        sequence_index = int(is_short.nonzero()[0])
        allowed_entries = int(total_budget[sequence_index])
        full_entries = int(total_budget[sequence_index] - remaining[sequence_index])
        required_budget = -(-(full_entries + other_heads) // head_total)
        kept_layers = full_layers.nonzero()[:, 0].tolist()
        raise BudgetRefused(
            f"inverse_variance:variant=release keeps layers {', '.join(map(str, kept_layers))} whole: "
            f"they hold {full_entries} entries and the others at least {other_heads}, "
            f"but the budget allows {allowed_entries}; use a budget of {required_budget} entries per head or more"
        )

    def _logs(self, layers: Sequence[Scored]) -> Tensor:
        """Return the log weights of the layers, float64 `[B, L]`."""
        view, layer_count = layers[0].view, len(layers)
        layer_indices = torch.arange(layer_count, device=view.length.device, dtype=torch.float64)
        if self.share == "uniform":
            return torch.zeros_like(layer_indices).expand(len(view.length), layer_count)
        if self.share == "layer_decay":
            return (-layer_indices / layer_count).expand(len(view.length), layer_count)
        densities = torch.stack([self._density(layer) for layer in layers], 1)
        if self.scale == "standardized":
            centred = densities - densities.mean(1, keepdim=True)
            deviation = centred.square().mean(1, keepdim=True).sqrt()
            densities = centred / torch.where(deviation > 0, deviation, 1.0)
        if self.share == "reciprocal":
            return -densities.clamp(min=_LEAST_VARIANCE).log()
        return -densities

    def _density(self, layer: Scored) -> Tensor:
        """Return `F` of one layer, float64 `[B]`."""
        view = layer.view
        accumulated, valid_mask = view.obs[AttentionMass()], view.valid
        if self.heads == "kv":
            accumulated = view.grouped(accumulated)
        else:
            valid_mask = valid_mask.repeat_interleave(view.model.group, 1)
        accumulated = accumulated.double().masked_fill(~valid_mask, 0.0)
        valid_counts = valid_mask.sum(-1, keepdim=True).clamp(min=1)
        centred = (accumulated - accumulated.sum(-1, keepdim=True) / valid_counts).masked_fill(~valid_mask, 0.0)
        variance = (centred.square().sum(-1, keepdim=True) / valid_counts)[..., 0]
        if self.scale == "release":
            minimum, maximum = variance.amin(1, keepdim=True), variance.amax(1, keepdim=True)
            variance = (variance - minimum) / (maximum - minimum + 1e-6)
        return variance.mean(1)
