"""Model information for the parts of a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ModelInfo:
    """Shapes and projections of the model.

    `output_weight(layer)` returns the output projection of a layer as `[H_q, d, d_model]`, one slice per query head
    (every call copies it, in the weight's own dtype).
    `project(layer, hidden)` projects hidden states `[B, n, d_model]` to queries, keys and values, before RoPE and
    before any query or key norm: `[B, n, (H_q + 2 H) d]`.
    `rotary(layer, position)` returns the cosines and sines with which RoPE rotates queries and keys of a layer at text
    positions `[n]`, float32 `[n, r]` each. RoPE applies to the first `r` of `d` channels and pairs channel `c` with
    channel `c + r/2`. Both tensors include the attention scaling factor that some RoPE variants use.
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
