"""Gates that rate the blocks of a cache for a query, in float32.

Gao, Guo, Cao and others: SeerAttention-R: Sparse Attention Adaptation for Long Reasoning, arXiv 2506.08889, section
2.2, Eq. 1. The authors' code can also apply an RMS norm after each of the two linear maps; Eq. 1 and the gates that
kvbench trains have none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kvbench.errors import UserError
from kvbench.plugin import Blocks
from kvbench.view.rope import angles, turn, turn_back
from kvbench_policies.gates.config import GateConfig


class _Layer(nn.Module):
    """Linear maps of one layer, per KV head: for the group's queries and for pooled keys.

    With `config.norm`, an RMS norm follows each map, shared by all KV heads.
    """

    def __init__(self, config: GateConfig) -> None:
        super().__init__()
        group_size, head_dim = config.query_heads // config.kv_heads, config.head_dim
        self.query = nn.Parameter(_random_weight(config.kv_heads, group_size * head_dim, config.gate_dim))
        self.key = nn.Parameter(_random_weight(config.kv_heads, 3 * head_dim, config.gate_dim))
        if config.norm:
            self.query_norm = nn.Parameter(torch.ones(config.gate_dim))
            self.key_norm = nn.Parameter(torch.ones(config.gate_dim))

    def queries(self, queries: Tensor) -> Tensor:
        """Map queries `[H, n, G d]` to `[H, n, gate_dim]`."""
        projected = queries @ self.query
        return _rms_norm(projected, self.query_norm) if hasattr(self, "query_norm") else projected

    def keys(self, pooled_keys: Tensor) -> Tensor:
        """Map pooled keys `[H, K, 3 d]` to `[H, K, gate_dim]`."""
        projected = pooled_keys @ self.key
        return _rms_norm(projected, self.key_norm) if hasattr(self, "key_norm") else projected


def _rms_norm(projected: Tensor, norm_weight: Tensor) -> Tensor:
    """Apply an RMS norm over the last axis, with the authors' epsilon."""
    return projected * (projected.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight


def _random_weight(head_count: int, input_dim: int, output_dim: int) -> Tensor:
    return torch.empty(head_count, input_dim, output_dim).uniform_(-1, 1) / math.sqrt(input_dim)


class BlockGates(nn.Module):
    """Block gates of all full-attention layers of a model.

    Args:
        config: Architecture; parameters are initialised from torch's global generator.
    """

    def __init__(self, config: GateConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))

    @property
    def block(self) -> int:
        """Entries per block."""
        return self.config.block

    def rate(self, v: Blocks) -> Tensor:
        """Return the logits of the softmax over blocks, `q k / sqrt(gate_dim)`, float32 `[H, n, K]`.

        RoPE is undone on queries and keys. Keys are pooled by maximum, minimum and mean. RoPE is applied again after
        the linear maps: to a query at its own position, to a block at the position of its first entry.

        Raises:
            UserError: The block size or `gate_dim` does not fit.
        """
        if v.key.shape[2] != self.block:
            raise UserError(
                f"the reader's blocks have {v.key.shape[2]} tokens, but the gates were trained with {self.block}"
            )
        layer_maps = self.layers[v.layer]
        with torch.autocast(v.query.device.type, enabled=False):
            query_cosines, query_sines = angles(v.model, v.layer, v.query_position)
            key_cosines, key_sines = angles(v.model, v.layer, v.position)
            queries = turn_back(v.query.float(), query_cosines, query_sines).transpose(1, 2).flatten(2)
            keys = turn_back(v.key.float(), key_cosines, key_sines)
            pooled_keys = torch.cat([keys.amax(2), keys.amin(2), keys.mean(2)], -1)
            queries = turn(layer_maps.queries(queries), *self._narrow(query_cosines, query_sines))
            pooled_keys = turn(layer_maps.keys(pooled_keys), *self._narrow(key_cosines[:, 0], key_sines[:, 0]))
            return queries @ pooled_keys.transpose(-1, -2) / math.sqrt(self.config.gate_dim)

    def _narrow(self, *rotations: Tensor) -> list[Tensor]:
        """Subsample cosines or sines `[n, r]` to `gate_dim` channels, evenly over the frequencies.

        These are the frequencies of RoPE in a head of `gate_dim` channels.
        """
        stride = self.config.head_dim // self.config.gate_dim
        pairs = rotations[0].shape[-1] // 2
        if pairs % stride:
            raise UserError(
                f"gate_dim={self.config.gate_dim} does not fit: RoPE rotates {2 * pairs} of "
                f"{self.config.head_dim} channels; use {self.config.head_dim}"
            )
        return [rotation[..., :pairs:stride].repeat(1, 2) for rotation in rotations]
