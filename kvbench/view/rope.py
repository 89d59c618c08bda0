"""RoPE and its inverse, for scores that use queries or keys before RoPE.

Cosines and sines come from `ModelInfo.rotary`. In models whose images have positions on several axes (M-RoPE), image
keys are rotated by their position in the sequence, as text is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.view.needs import ModelInfo


def angles(model: ModelInfo, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of a layer at any positions.

    Args:
        model: The model.
        layer: Index among the full-attention layers.
        positions: int64, any shape; negative positions count as 0.

    Returns:
        float32 `[*positions.shape, r]` each.

    Raises:
        UserError: The model has no rotary embedding, or rotates otherwise than `turn`.
    """
    if model.rotary is None:
        raise UserError(f"cannot read the rotary embedding of model {model.name}")
    cos, sin = model.rotary(layer, positions.flatten().clamp(min=0))
    return cos.unflatten(0, positions.shape), sin.unflatten(0, positions.shape)


def turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `states` `[..., d]` by angles `[..., r]`; channels from `r` on are unchanged."""
    rotary_dim = cos.shape[-1]
    return torch.cat(
        [
            states[..., :rotary_dim] * cos + _half_turn(states[..., :rotary_dim]) * sin,
            states[..., rotary_dim:],
        ],
        -1,
    )


def turn_back(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the inverse of `turn`."""
    squared_norm = cos.square() + sin.square()
    return turn(states, cos / squared_norm, -sin / squared_norm)


def _half_turn(states: Tensor) -> Tensor:
    first_half, second_half = states.chunk(2, dim=-1)
    return torch.cat([-second_half, first_half], -1)
