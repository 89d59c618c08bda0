"""Forward pass of the capacity loss for long sequences: linear in T, in torch, on any device.

    S_t = sum_{i <= t} exp((t - i) l_i)

Rates `-l` fall into panels that double in width, `[0, c/T], [c/T, 2c/T], ...` up to `TOP`. On each panel, `exp(-a x)`
is interpolated in x through `NODES` Chebyshev nodes, for all ages a at once: with the weights `w_k` of an entry on the
nodes `x_k` of its panel,

    exp(a l) = sum_k w_k(l) exp(-a x_k)

to within 4e-7 at any age, and summed over ages to within 4e-7 of the sum. Everything before a block of steps is thus a
sum of `K` shared decays, and each moves to the next block with one product; only pairs within a block are computed
individually. Entries that decay faster than `TOP` contribute less than 1e-7 to later blocks.

Per step, a row of T steps takes `BLOCK / 2 + NODES` exponentials and `2 K` flops to apply the decays; blocks are summed
in `log2(T / BLOCK)` doublings. For the global loss, the decays of all heads are added before they are applied to the
steps. On a GPU, memory traffic is the bottleneck: about 3.4 KB per step and row.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

BLOCK = 32
"""Steps per block."""
NODES = 10
"""Chebyshev nodes per panel."""
LEAST = 4.0
"""The first panel ends at the rate that decays to `exp(-LEAST)` over the whole sequence."""
TOP = 16.0
"""Faster decays do not reach later blocks."""
_AT_ONCE = 1 << 21
"""Tokens per pass, over all rows."""


@functools.lru_cache(maxsize=16)
def panels(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the upper ends `[P]` and nodes `[P, NODES]` of the panels for a sequence length, float32."""
    panel_count = max(1, math.ceil(math.log2(TOP * length / LEAST)) + 1)
    panel_ends = LEAST / length * 2.0 ** torch.arange(panel_count, dtype=torch.float64)
    panel_begins = torch.cat([panel_ends.new_zeros(1), panel_ends[:-1]])
    nodes = panel_begins[:, None] + (panel_ends - panel_begins)[:, None] * (1 + _chebyshev()) / 2
    return panel_ends.float().to(device), nodes.float().to(device)


def _chebyshev() -> Tensor:
    """Return the Chebyshev nodes on [-1, 1], float64."""
    return torch.cos((2 * torch.arange(NODES, dtype=torch.float64) + 1) * math.pi / (2 * NODES))


def weights(decay_rates: Tensor, panel_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return interpolation weights of rates on the nodes of their panels.

    Args:
        decay_rates: `-log beta >= 0`, any shape.
        panel_ends: Upper ends from `panels`.

    Returns:
        The panel of each rate, int64 in that shape, and its weights `[..., NODES]`, which sum to 1.
    """
    panel_indices = torch.bucketize(decay_rates, panel_ends).clamp_max(len(panel_ends) - 1)
    upper_ends = panel_ends[panel_indices]
    lower_ends = torch.where(panel_indices > 0, upper_ends / 2, 0.0)
    unit_rates = ((decay_rates - lower_ends) / (upper_ends - lower_ends) * 2 - 1).clamp(-1.0, 1.0)
    # Lagrange polynomials on these nodes are sums of Chebyshev polynomials, T_m(u) T_m(node).
    degrees = torch.arange(NODES, dtype=torch.float64)
    basis = torch.cos(degrees[:, None] * torch.acos(_chebyshev())) * (2 / NODES)
    basis[0] /= 2
    polynomials = [torch.ones_like(unit_rates), unit_rates]
    for _ in range(NODES - 2):
        polynomials.append(2 * unit_rates * polynomials[-1] - polynomials[-2])
    return panel_indices, torch.stack(polynomials, -1) @ basis.to(unit_rates)


def sums(log_beta: Tensor, first_steps: Tensor, is_global: bool) -> Tensor:
    """Compute `op.capacity_sums` by panels.

    Args:
        log_beta: float32 `[B, R, T]`.
        first_steps: First column of each sequence, int32 `[B]`; S is 0 before it.
        is_global: Sum over the rows.

    Returns:
        float32 `[B, R, T]`, or float64 `[B, 1, T]`.
    """
    batch_size, _, length = log_beta.shape
    panel_ends, nodes = panels(length, log_beta.device)
    step_indices = torch.arange(length, device=log_beta.device)
    inside_mask = (step_indices >= first_steps[:, None])[:, None]
    rows_per_pass = max(1, _AT_ONCE // max(1, batch_size * length))
    near_sums, far_states, outputs = [], None, []
    for row_rates in log_beta.split(rows_per_pass, 1):
        decay_rates, block_mask = _blocks(-row_rates, inside_mask)
        within_sums = _within(decay_rates, block_mask)
        states = _states(decay_rates, block_mask, panel_ends, nodes)
        if is_global:
            near_sums.append(within_sums.sum(1, keepdim=True, dtype=torch.float64))
            state_sums = states.sum(1, keepdim=True)
            far_states = state_sums if far_states is None else far_states + state_sums
        else:
            outputs.append(within_sums + _later(states, nodes))
    if is_global:
        assert far_states is not None
        outputs = [torch.stack(near_sums).sum(0) + _later(far_states, nodes)]
    totals = torch.cat(outputs, 1).flatten(2)[..., :length]
    return totals.masked_fill_(~inside_mask, 0.0).contiguous()


def _blocks(decay_rates: Tensor, inside_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rates (0 outside a sequence) and the mask of inside steps, `[B, R or 1, n, BLOCK]` each."""
    padding = -decay_rates.shape[-1] % BLOCK
    decay_rates = torch.nn.functional.pad(decay_rates.masked_fill(~inside_mask, 0.0), (0, padding))
    inside_mask = torch.nn.functional.pad(inside_mask, (0, padding))
    return decay_rates.unflatten(-1, (-1, BLOCK)), inside_mask.unflatten(-1, (-1, BLOCK))


def _within(decay_rates: Tensor, block_mask: Tensor) -> Tensor:
    """Sum the contributions of a step's own block, pair by pair."""
    retained = block_mask.to(decay_rates.dtype).expand(decay_rates.shape).clone()
    for distance in range(1, BLOCK):
        retained[..., distance:] += (decay_rates[..., :-distance] * -distance).exp_().mul_(block_mask[..., :-distance])
    return retained


def _states(decay_rates: Tensor, block_mask: Tensor, panel_ends: Tensor, nodes: Tensor) -> Tensor:
    """Return the remainder of each block at its last step, per decay, `[B, R, n, K]`."""
    panel_indices, node_weights = weights(decay_rates, panel_ends)
    steps_left = torch.arange(BLOCK - 1, -1, -1, device=decay_rates.device)[:, None]
    node_weights = (
        node_weights * (-steps_left * nodes[panel_indices]).exp_() * (block_mask & (decay_rates <= TOP))[..., None]
    )
    slot_indices = panel_indices[..., None] * NODES + torch.arange(NODES, device=decay_rates.device)
    states = decay_rates.new_zeros(*decay_rates.shape[:-1], nodes.numel())
    return states.scatter_add_(-1, slot_indices.flatten(-2), node_weights.flatten(-2))


def _later(states: Tensor, nodes: Tensor) -> Tensor:
    """Return the contribution of all earlier blocks to each block's steps, `[B, R, n, BLOCK]`."""
    decays = nodes.flatten()
    shift = 1
    while shift < states.shape[-2]:
        passed = states[..., :-shift, :] * (-BLOCK * shift * decays).exp()
        states[..., shift:, :] += passed
        shift *= 2
    distances = torch.arange(1, BLOCK + 1, device=decays.device)
    fading = (-decays[:, None] * distances).exp()
    later_sums = states.new_zeros(*states.shape[:-1], BLOCK)
    later_sums[..., 1:, :] = states[..., :-1, :] @ fading
    return later_sums
