"""Gates that rate blocks of a cache for a query, in float32.

Gao, Guo, Cao and others: SeerAttention-R: Sparse Attention Adaptation for Long Reasoning, arXiv
2506.08889, section 2.2, Eq. 1. The authors' code can also put an RMS norm behind each of the two
linear maps; Eq. 1 has none, and neither have gates that kvbench trains.
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
    """One layer's linear maps, one per KV head: queries of the group, and pooled keys.

    With `config.norm` an RMS norm follows each of them, the same for all KV heads.
    """

    def __init__(self, config: GateConfig) -> None:
        super().__init__()
        group, dim = config.query_heads // config.kv_heads, config.head_dim
        self.query = nn.Parameter(_drawn(config.kv_heads, group * dim, config.gate_dim))
        self.key = nn.Parameter(_drawn(config.kv_heads, 3 * dim, config.gate_dim))
        if config.norm:
            self.query_norm = nn.Parameter(torch.ones(config.gate_dim))
            self.key_norm = nn.Parameter(torch.ones(config.gate_dim))

    def queries(self, query: Tensor) -> Tensor:
        """Map queries `[H, n, G d]` to `[H, n, gate_dim]`."""
        out = query @ self.query
        return _normed(out, self.query_norm) if hasattr(self, "query_norm") else out

    def keys(self, pooled: Tensor) -> Tensor:
        """Map pooled keys `[H, K, 3 d]` to `[H, K, gate_dim]`."""
        out = pooled @ self.key
        return _normed(out, self.key_norm) if hasattr(self, "key_norm") else out


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last axis, with the authors' epsilon."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _drawn(heads: int, width: int, out: int) -> Tensor:
    return torch.empty(heads, width, out).uniform_(-1, 1) / math.sqrt(width)


class BlockGates(nn.Module):
    """The gates of all full-attention layers of a model.

    Args:
        config: The configuration; parameters are drawn from torch's generator.
    """

    def __init__(self, config: GateConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))

    @property
    def block(self) -> int:
        """Entries of a block."""
        return self.config.block

    def rate(self, v: Blocks) -> Tensor:
        """Logits of the softmax over blocks, `q k / sqrt(gate_dim)`, float32 `[H, n, K]`.

        Queries and keys are turned back to what they were before RoPE. Keys are pooled by their
        maximum, minimum and mean. What the linear maps make of them is turned again: a query by its
        own position, a block by that of its first entry.

        Raises:
            UserError: RoPE turns channels that `gate_dim` does not divide.
        """
        if v.key.shape[2] != self.block:
            raise UserError(f"blocks have {v.key.shape[2]} tokens, but the gates {self.block}")
        layer = self.layers[v.layer]
        with torch.autocast(v.query.device.type, enabled=False):
            cos, sin = angles(v.model, v.layer, v.query_position)
            at, across = angles(v.model, v.layer, v.position)
            query = turn_back(v.query.float(), cos, sin).transpose(1, 2).flatten(2)
            key = turn_back(v.key.float(), at, across)
            pooled = torch.cat([key.amax(2), key.amin(2), key.mean(2)], -1)
            query = turn(layer.queries(query), *self._narrow(cos, sin))
            pooled = turn(layer.keys(pooled), *self._narrow(at[:, 0], across[:, 0]))
            return query @ pooled.transpose(-1, -2) / math.sqrt(self.config.gate_dim)

    def _narrow(self, *angles: Tensor) -> list[Tensor]:
        """Cosines or sines `[n, r]` for `gate_dim` channels: every so-many-th of the frequencies.

        These are the frequencies that RoPE has in a head of `gate_dim` channels.
        """
        step = self.config.head_dim // self.config.gate_dim
        half = angles[0].shape[-1] // 2
        if half % step:
            raise UserError(
                f"gate_dim={self.config.gate_dim} does not fit: RoPE turns {2 * half} channels of "
                f"{self.config.head_dim}; use {self.config.head_dim}"
            )
        return [x[..., :half:step].repeat(1, 2) for x in angles]
