"""The model as a part of a policy sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ModelInfo:
    """The model as a policy sees it.

    `output_weight(layer)` returns the output projection of a layer as `[H_q, d, d_model]`, one
    slice per query head (a copy in the weight's own dtype, made by every call).
    `project(layer, hidden)` projects hidden states `[B, n, d_model]` to queries, keys and values,
    before RoPE and before any query or key norm: `[B, n, (H_q + 2 H) d]`.
    `rotary(layer, position)` returns the cosines and sines by which RoPE turns queries and keys of
    a layer at text positions `[n]`, float32 `[n, r]` each: of their first `r` of `d` channels,
    channel `c` belongs together with channel `c + r/2`. Both contain the factor that some kinds of
    RoPE scale attention with.
    """

    name: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    hidden_size: int
    output_weight: Callable[[int], Tensor] = field(compare=False, repr=False)
    project: Callable[[int, Tensor], Tensor] | None = field(default=None, compare=False, repr=False)
    rotary: Callable[[int, Tensor], tuple[Tensor, Tensor]] | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per KV head, `G`."""
        return self.query_heads // self.kv_heads
