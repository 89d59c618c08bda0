"""What allocators that measure layers have in common: shares by weights, kept while decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from kvbench.parts import fill, largest_remainder
from kvbench.plugin import Scored, View


def measured(layers: Sequence[Scored], name: Hashable, measure: Callable[[View], Tensor]) -> Tensor:
    """Measure every layer once for all budgets, on the device of its keys.

    An allocator of the whole model is shown the views of all layers on one device, but for keys and
    values.

    Args:
        layers: All layers.
        name: Identifies what is measured, with its parameters.
        measure: Gives a number for each sequence, `[B]`; as `View.once` takes it.

    Returns:
        `[B, L]`.
    """
    found = [x.view.once(name, lambda v: measure(_at_home(v))) for x in layers]
    where = layers[0].view.length.device
    return torch.stack([x.to(where) for x in found], 1)


def _at_home(view: View) -> View:
    """A view with all that it shows on the device of its keys."""
    home = view.key.device
    if view.length.device == home:
        return view
    near = copy.copy(view)
    near.length, near.position, near.valid = (
        x.to(home) for x in (view.length, view.position, view.valid)
    )
    near.obs = {need: x.to(home) for need, x in view.obs.items()}
    return near


def held_before(layers: Sequence[Scored], total: Tensor) -> tuple[Tensor, Tensor]:
    """What heads held before the text went on, at moment `decode`.

    Measurements of layers belong to the prefill, so a cache that was cut before keeps the shares
    that its heads have. Every head gained the same number of entries since.

    Args:
        layers: All layers.
        total: Entries that they keep in all, int64 `[B]`.

    Returns:
        float64 `[B, L, H]`, and which sequences were cut before, bool `[B]`; none at other moments.
    """
    v = layers[0].view
    held = torch.stack([x.view.valid.sum(-1) for x in layers], 1)
    if v.moment != "decode":
        return held.double(), torch.zeros_like(v.length, dtype=torch.bool)
    gained = (held.sum((1, 2)) - total).double() / (held.shape[1] * held.shape[2])
    before = (held - gained[:, None, None]).clamp(min=1e-9)
    return before, (held < v.length[:, None, None]).any(2).any(1)


def spread_by_weight(
    layers: Sequence[Scored], weight: Tensor, base: Tensor, total: Tensor
) -> Tensor:
    """Give every head a base, and the rest to the layers in proportion to their weights.

    All heads of a layer get the same. What a head cannot hold goes to the others in proportion.
    Shares are even where the base takes everything, and keep their proportions where a cache was
    cut before (see `held_before`). They are rounded by largest remainder.

    Args:
        layers: All layers.
        weight: 0 or more, float64 `[B, L]`.
        base: Entries that every head gets first, float64 `[B]`; not more than it holds.
        total: Entries that the layers keep in all, int64 `[B]`.

    Returns:
        int64 `[B, L, H]` summing to `total`.
    """
    held = torch.stack([x.view.valid.sum(-1) for x in layers], 1)
    before, stay = held_before(layers, total)
    weights = torch.where(stay[:, None, None], before, weight[:, :, None].expand_as(before))
    most, weights = held.flatten(1), weights.flatten(1)
    low = torch.minimum(base[:, None], most.double()).masked_fill(stay[:, None], 0.0)
    even = low.sum(-1) >= total
    low = low.masked_fill(even[:, None], 0.0)
    weights = weights.masked_fill(even[:, None], 1.0)
    real = low + fill(weights, total - low.sum(-1), most - low)
    return largest_remainder(real, total, most, 1).view(held.shape)
