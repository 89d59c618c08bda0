"""Helpers for allocators that measure layers: budgets in proportion to weights, constant while decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from kvbench.parts import fill, largest_remainder
from kvbench.plugin import Scored, View


def measured(layers: Sequence[Scored], cache_key: Hashable, measure: Callable[[View], Tensor]) -> Tensor:
    """Measure every layer once for all budgets, on the device of its keys.

    A model-wide allocator gets the views of all layers on one device, except keys and values.

    Args:
        layers: All layers.
        cache_key: Identifies the measurement and its parameters.
        measure: Returns a number per sequence, `[B]`; passed to `View.once`.

    Returns:
        `[B, L]`.
    """
    results = [layer.view.once(cache_key, lambda view: measure(_on_key_device(view))) for layer in layers]
    device = layers[0].view.length.device
    return torch.stack([layer.to(device) for layer in results], 1)


def _on_key_device(view: View) -> View:
    """Return the view with all its tensors on the device of its keys."""
    key_device = view.key.device
    if view.length.device == key_device:
        return view
    local_view = copy.copy(view)
    local_view.length, local_view.position, local_view.valid = (
        tensor.to(key_device) for tensor in (view.length, view.position, view.valid)
    )
    local_view.obs = {need: tensor.to(key_device) for need, tensor in view.obs.items()}
    return local_view


def held_before(layers: Sequence[Scored], total_budget: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries per head after the previous eviction step, at moment `decode`.

    Layers are measured during the prefill, so a cache that was compressed before keeps its per-head budgets. Every head
    has gained the same number of entries since.

    Args:
        layers: All layers.
        total_budget: Total entries kept over all layers, int64 `[B]`.

    Returns:
        float64 `[B, L, H]`, and the sequences that were compressed before, bool `[B]` (all False at other moments).
    """
    view = layers[0].view
    entry_counts = torch.stack([layer.view.valid.sum(-1) for layer in layers], 1)
    if view.moment != "decode":
        return entry_counts.double(), torch.zeros_like(view.length, dtype=torch.bool)
    gained_entries = (entry_counts.sum((1, 2)) - total_budget).double() / (
        entry_counts.shape[1] * entry_counts.shape[2]
    )
    previous_counts = (entry_counts - gained_entries[:, None, None]).clamp(min=1e-9)
    return previous_counts, (entry_counts < view.length[:, None, None]).any(2).any(1)


def spread_by_weight(
    layers: Sequence[Scored], layer_weights: Tensor, base_shares: Tensor, total_budget: Tensor
) -> Tensor:
    """Give every head a base budget and distribute the rest over layers in proportion to their weights.

    All heads of a layer get the same budget; the excess of a full head goes to the others in proportion. Budgets are
    even if the base uses up everything, and keep their proportions if the cache was compressed before (see
    `held_before`). They are rounded by largest remainder.

    Args:
        layers: All layers.
        layer_weights: 0 or more, float64 `[B, L]`.
        base_shares: Base budget per head, float64 `[B]`, capped at the entries it holds.
        total_budget: Total entries kept over all layers, int64 `[B]`.

    Returns:
        int64 `[B, L, H]` summing to `total_budget`.
    """
    entry_counts = torch.stack([layer.view.valid.sum(-1) for layer in layers], 1)
    previous_counts, stay_mask = held_before(layers, total_budget)
    head_weights = torch.where(
        stay_mask[:, None, None],
        previous_counts,
        layer_weights[:, :, None].expand_as(previous_counts),
    )
    upper_bounds, head_weights = entry_counts.flatten(1), head_weights.flatten(1)
    lower_bounds = torch.minimum(base_shares[:, None], upper_bounds.double()).masked_fill(stay_mask[:, None], 0.0)
    fills_base = lower_bounds.sum(-1) >= total_budget
    lower_bounds = lower_bounds.masked_fill(fills_base[:, None], 0.0)
    head_weights = head_weights.masked_fill(fills_base[:, None], 1.0)
    exact_shares = lower_bounds + fill(head_weights, total_budget - lower_bounds.sum(-1), upper_bounds - lower_bounds)
    return largest_remainder(exact_shares, total_budget, upper_bounds, 1).view(entry_counts.shape)
