"""Forward of the capacity loss for long sequences: linear in T, in torch, on any device.

    S_t = sum_{i <= t} exp((t - i) l_i)

Rates `-l` fall into panels that double in width, `[0, c/T], [c/T, 2c/T], ...` up to `TOP`. On each
panel, `exp(-a x)` is interpolated in x through `NODES` Chebyshev nodes, for all ages a at once:
with the weights `w_k` of an entry on the nodes `x_k` of its panel,

    exp(a l) = sum_k w_k(l) exp(-a x_k)

at any age to within 4e-7, and summed over ages to within 4e-7 of the sum. So everything before a
block of steps is a sum of `K` decays that all entries share, and it moves on to the next block by
one product each; only pairs within a block are computed one by one. Entries that fade faster than
`TOP` contribute nothing (1e-7) to later blocks.

A row of T steps takes `BLOCK / 2 + NODES` exponentials per step, and `2 K` flops to apply the
decays to the steps; blocks are summed in `log2(T / BLOCK)` doublings. For the global loss the
decays of all heads are added first and applied to the steps once. On a GPU memory is the
bottleneck: about 3.4 KB of traffic per step and row.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

BLOCK = 32
"""Steps of a block."""
NODES = 10
"""Chebyshev nodes of a panel."""
LEAST = 4.0
"""The first panel ends where an entry fades to `exp(-LEAST)` over the whole sequence."""
TOP = 16.0
"""Rates above it do not reach later blocks."""
_AT_ONCE = 1 << 21
"""Number of tokens, over all rows, that are processed together."""


@functools.lru_cache(maxsize=16)
def panels(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Upper ends `[P]` and nodes `[P, NODES]` of the panels for sequences of a length, float32."""
    count = max(1, math.ceil(math.log2(TOP * length / LEAST)) + 1)
    ends = LEAST / length * 2.0 ** torch.arange(count, dtype=torch.float64)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    nodes = begins[:, None] + (ends - begins)[:, None] * (1 + _chebyshev()) / 2
    return ends.float().to(device), nodes.float().to(device)


def _chebyshev() -> Tensor:
    """The nodes on [-1, 1], float64."""
    return torch.cos((2 * torch.arange(NODES, dtype=torch.float64) + 1) * math.pi / (2 * NODES))


def weights(rate: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Weights that express rates by the nodes of their panels.

    Args:
        rate: `-log beta >= 0`, any shape.
        ends: Upper ends from `panels`.

    Returns:
        The panel of each rate, int64 in that shape, and its weights `[..., NODES]`, which sum to 1.
    """
    panel = torch.bucketize(rate, ends).clamp_max(len(ends) - 1)
    end = ends[panel]
    begin = torch.where(panel > 0, end / 2, 0.0)
    u = ((rate - begin) / (end - begin) * 2 - 1).clamp(-1.0, 1.0)
    # Lagrange's polynomials on these nodes are sums of Chebyshev's, T_m(u) T_m(node).
    m = torch.arange(NODES, dtype=torch.float64)
    basis = torch.cos(m[:, None] * torch.acos(_chebyshev())) * (2 / NODES)
    basis[0] /= 2
    powers = [torch.ones_like(u), u]
    for _ in range(NODES - 2):
        powers.append(2 * u * powers[-1] - powers[-2])
    return panel, torch.stack(powers, -1) @ basis.to(u)


def sums(log_beta: Tensor, start: Tensor, together: bool) -> Tensor:
    """`op.capacity_sums` by panels.

    Args:
        log_beta: float32 `[B, R, T]`.
        start: First column of each sequence, int32 `[B]`; S is 0 before it.
        together: Whether to sum over the rows.

    Returns:
        float32 `[B, R, T]`, or float64 `[B, 1, T]`.
    """
    batch, _, length = log_beta.shape
    ends, nodes = panels(length, log_beta.device)
    step = torch.arange(length, device=log_beta.device)
    inside = (step >= start[:, None])[:, None]
    size = max(1, _AT_ONCE // max(1, batch * length))
    near, far, out = [], None, []
    for part in log_beta.split(size, 1):
        rate, here = _blocks(-part, inside)
        within = _within(rate, here)
        states = _states(rate, here, ends, nodes)
        if together:
            near.append(within.sum(1, keepdim=True, dtype=torch.float64))
            added = states.sum(1, keepdim=True)
            far = added if far is None else far + added
        else:
            out.append(within + _later(states, nodes))
    if together:
        assert far is not None
        out = [torch.stack(near).sum(0) + _later(far, nodes)]
    total = torch.cat(out, 1).flatten(2)[..., :length]
    return total.masked_fill_(~inside, 0.0).contiguous()


def _blocks(rate: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Rates, 0 outside a sequence, and which steps are inside, `[B, R or 1, n, BLOCK]` each."""
    more = -rate.shape[-1] % BLOCK
    rate = torch.nn.functional.pad(rate.masked_fill(~inside, 0.0), (0, more))
    inside = torch.nn.functional.pad(inside, (0, more))
    return rate.unflatten(-1, (-1, BLOCK)), inside.unflatten(-1, (-1, BLOCK))


def _within(rate: Tensor, here: Tensor) -> Tensor:
    """Contribution of the entries of a step's own block, pair by pair."""
    out = here.to(rate.dtype).expand(rate.shape).clone()
    for age in range(1, BLOCK):
        out[..., age:] += (rate[..., :-age] * -age).exp_().mul_(here[..., :-age])
    return out


def _states(rate: Tensor, here: Tensor, ends: Tensor, nodes: Tensor) -> Tensor:
    """What remains of a block at its last step, by decay: `[B, R, n, K]`."""
    panel, weight = weights(rate, ends)
    left = torch.arange(BLOCK - 1, -1, -1, device=rate.device)[:, None]
    weight = weight * (-left * nodes[panel]).exp_() * (here & (rate <= TOP))[..., None]
    slot = panel[..., None] * NODES + torch.arange(NODES, device=rate.device)
    states = rate.new_zeros(*rate.shape[:-1], nodes.numel())
    return states.scatter_add_(-1, slot.flatten(-2), weight.flatten(-2))


def _later(states: Tensor, nodes: Tensor) -> Tensor:
    """Contribution of all earlier blocks to the steps of each block, `[B, R, n, BLOCK]`."""
    decay = nodes.flatten()
    shift = 1
    while shift < states.shape[-2]:
        passed = states[..., :-shift, :] * (-BLOCK * shift * decay).exp()
        states[..., shift:, :] += passed
        shift *= 2
    age = torch.arange(1, BLOCK + 1, device=decay.device)
    reach = (-decay[:, None] * age).exp()
    out = states.new_zeros(*states.shape[:-1], BLOCK)
    out[..., 1:, :] = states[..., :-1, :] @ reach
    return out
