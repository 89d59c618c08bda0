"""D2O's shares of the layers: a layer keeps more the more evenly it attends.

Wan, Wu, Zhang and others: D2O: Dynamic Discriminative Operations for Efficient Long-Context
Inference of Large Language Models, arXiv 2406.13035, section 4.1, equations 4 and 5, and the other
shares of Table 4.
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
"""Smallest variance whose reciprocal is taken."""


def fill_logs(logs: Tensor, total: Tensor, most: Tensor, least: Tensor) -> Tensor:
    """Spread totals in proportion to `exp(logs)`, each share within its bounds, not yet rounded.

    What a bound cuts off goes to the others in proportion to their weights. Weights are compared
    only with the largest weight that still takes part, so they may be any number of orders of
    magnitude apart; equal weights share evenly.

    Args:
        logs: Logarithms of the weights, finite float64 `[B, K]`.
        total: int64 `[B]`, between the sums of `least` and `most`.
        most: Upper bounds, int64 `[B, K]`.
        least: Lower bounds, int64 `[B, K]`, at most `most`.

    Returns:
        float64 `[B, K]` summing to `total` (up to rounding).
    """

    def proportional(left: Tensor, fixed: Tensor) -> Tensor:
        return left * torch.softmax(logs.masked_fill(fixed, float("-inf")), -1)

    return water_fill(proportional, total, most.double(), least.double())


@dataclass(frozen=True)
class InverseVariance(Allocator):
    """Layers share the budget by the variance of the attention that their entries received.

        F_l = mean_h Var_i( sum_q A_{l,h}[q, i] ),    layer l gets exp(-F_l) / sum_m exp(-F_m)

    `h` runs over the layer's query heads, as in the authors' code. All KV heads of a layer get the
    same share, clipped to `[max(1, floor(0.01 T)), T]` (the floor shrinks to the mean share `b`).
    What this cuts off is spread over the others in proportion to their weights. Shares are rounded
    by largest remainder; ties go to the lower layer and head.

    `F` belongs to the prefill: at moment `decode` a cache that was cut before keeps the shares that
    its heads have. At `chunked` and `turns` new context follows, and every cut measures `F` again
    from the held entries.

    Attributes:
        scale: `release` (the authors' code) scales the variances of a layer's heads to
            `(x - min) / (max - min + 1e-6)` before the mean over heads, so that `F` is in [0, 1].
            `raw` follows the equation; at real lengths one layer then takes nearly everything.
            `standardized` subtracts from `F` its mean over layers and divides by its standard
            deviation.
        share: `inverse_variance`; `reciprocal` (`1 / F_l`) and `uniform` from the paper's Table 4;
            or kvbench's own `layer_decay`, `exp(-l / L)` (the paper gives no formula for its
            exponential decay).
        heads: `query` takes the variances of every query head's attention, `kv` those of its mean
            over the query heads of a KV head (with two KV heads and `scale=release`, `F` is then
            1/2 in all layers).
        variant: `paper`, or `release` (the authors' code): the first two layers and the last keep
            everything (at `decode` they grow with the text), and the others share the rest of the
            budget.
    """

    name: ClassVar[str] = "inverse_variance"
    scope: ClassVar[Literal["head", "layer", "model"]] = "model"
    scale: Literal["release", "raw", "standardized"] = "release"
    share: Literal["inverse_variance", "reciprocal", "uniform", "layer_decay"] = "inverse_variance"
    heads: Literal["query", "kv"] = "query"
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        """Refuse the reciprocal of numbers around 0."""
        if self.share == "reciprocal" and self.scale == "standardized":
            raise UserError(
                "share=reciprocal cannot use scale=standardized, whose variances may be negative; "
                "use scale=release or scale=raw"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """The attention that every entry received."""
        return frozenset({AttentionMass()})

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Spread a total (int64 `[B]`) over the heads of all layers, int64 `[B, L, H]`.

        Raises:
            BudgetRefused: The layers that `variant=release` keeps whole leave too little.
        """
        v = layers[0].view
        count, heads = len(layers), v.model.kv_heads
        held = torch.stack([x.view.valid.sum(-1) for x in layers], 1)
        whole = self._whole(count, total.device)
        left = total - (held * whole[:, None]).sum((1, 2))
        others = heads * int((~whole).sum())
        self._check(left, others, total, whole, count * heads)
        logs = self._logs(layers)[:, :, None].expand_as(held)
        before, stay = held_before(layers, total)
        logs = torch.where(stay[:, None, None], before.log(), logs)
        least = torch.where(stay, 1, (v.length // 100).clamp(min=1))
        floor = torch.minimum(least, left // max(1, others))[:, None, None]
        low = torch.minimum(torch.where(whole[:, None], held, floor), held).flatten(1)
        most = held.flatten(1)
        real = fill_logs(logs.flatten(1), total, most, low)
        return largest_remainder(real, total, most, low).view(held.shape)

    def _whole(self, layers: int, device: torch.device) -> Tensor:
        """Which layers keep everything, bool `[L]`."""
        index = torch.arange(layers, device=device)
        if self.variant == "paper":
            return torch.zeros_like(index, dtype=torch.bool)
        return (index < 2) | (index == layers - 1)

    def _check(self, left: Tensor, others: int, total: Tensor, whole: Tensor, units: int) -> None:
        if self.variant == "paper":
            return
        short = left < others if others else left != 0
        if not bool(short.any()):
            return
        row = int(short.nonzero()[0])
        n, taken = int(total[row]), int(total[row] - left[row])
        need = -(-(taken + others) // units)
        kept = whole.nonzero()[:, 0].tolist()
        raise BudgetRefused(
            f"inverse_variance:variant=release keeps layers {', '.join(map(str, kept))} whole: "
            f"they hold {taken} entries and the others at least {others}, but the budget allows "
            f"{n}; use a budget of {need} entries per head or more"
        )

    def _logs(self, layers: Sequence[Scored]) -> Tensor:
        """Logarithms of the layers' weights, float64 `[B, L]`."""
        v, count = layers[0].view, len(layers)
        index = torch.arange(count, device=v.length.device, dtype=torch.float64)
        if self.share == "uniform":
            return torch.zeros_like(index).expand(len(v.length), count)
        if self.share == "layer_decay":
            return (-index / count).expand(len(v.length), count)
        density = torch.stack([self._density(x) for x in layers], 1)
        if self.scale == "standardized":
            centred = density - density.mean(1, keepdim=True)
            deviation = centred.square().mean(1, keepdim=True).sqrt()
            density = centred / torch.where(deviation > 0, deviation, 1.0)
        if self.share == "reciprocal":
            return -density.clamp(min=_LEAST_VARIANCE).log()
        return -density

    def _density(self, layer: Scored) -> Tensor:
        """`F` of one layer, float64 `[B]`."""
        v = layer.view
        mass, valid = v.obs[AttentionMass()], v.valid
        if self.heads == "kv":
            mass = v.grouped(mass)
        else:
            valid = valid.repeat_interleave(v.model.group, 1)
        mass = mass.double().masked_fill(~valid, 0.0)
        count = valid.sum(-1, keepdim=True).clamp(min=1)
        centred = (mass - mass.sum(-1, keepdim=True) / count).masked_fill(~valid, 0.0)
        variance = (centred.square().sum(-1, keepdim=True) / count)[..., 0]
        if self.scale == "release":
            low, high = variance.amin(1, keepdim=True), variance.amax(1, keepdim=True)
            variance = (variance - low) / (high - low + 1e-6)
        return variance.mean(1)
