"""OBCache: how much the attention output changes without an entry, to second order.

Gu, Liang, Zhao, Diao: OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM
Inference, arXiv 2510.07651. The three scores are derived here from the description in the abstract:
the squared change of a query's output, expanded to second order, when an entry's value, its logit
or both are set to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Queries, Scores, View, protect_window
from kvbench_policies.windows import WindowScore

_BLOCK = 1 << 22
"""Number of elements (query heads x queries x entries) scored at once for each sequence."""


@dataclass(frozen=True)
class OutputAware(WindowScore):
    """Squared change of the window queries' outputs without an entry, to second order.

    With scaled logit `z`, attention `A` over all that a query sees, and output `o_q = sum_i A v_i`:

        joint   s_i = sum_q A[q, i]^2 || v_i + z[q, i] (v_i - o_q) ||^2
        value   s_i = sum_q A[q, i]^2 || v_i ||^2
        key     s_i = sum_q (A[q, i] z[q, i])^2 || v_i - o_q ||^2

    summed over the queries of the last `window` tokens, which are protected, and over the group.
    The norms are expanded, so no vector per (query, entry) is ever formed.

    Attributes:
        variant: What is set to 0: the value (`value`), the logit (`key`) or both (`joint`).
        window: Number of observing queries, in tokens.
        kernel: Width of a pooling over the past in entries, odd; 1 turns pooling off.
        pool: `max` or `avg`; zeros lie beyond the ends.
        group: How the query heads of a KV head are reduced: `sum`, `mean` or `max`.
    """

    name: ClassVar[str] = "obcache"
    nonnegative: ClassVar[bool] = True
    variant: Literal["joint", "value", "key"] = "joint"
    kernel: int = 1
    pool: Literal["max", "avg"] = "max"
    group: Literal["sum", "mean", "max"] = "sum"

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the window."""
        before_window = self.past(v)
        value = v.grouped(self._lost(v), self.group).masked_fill(~before_window, 0.0)
        value = self.pooled(value, self.pool)
        return Scores(value.masked_fill(~before_window, 0.0), protect_window(v, self.window))

    def _lost(self, v: View) -> Tensor:
        """Sum over the window's queries for each query head, float32 `[B, H_q, n]`."""
        batch, heads, n = v.shape
        rows = (heads, v.model.group * self.window)
        weight = v.window_attention(self.window).reshape(batch, *rows, n)
        query = v.obs[Queries(self.window)].float().reshape(batch, *rows, -1) * v.scale
        # Padding has weight 0 but may hold NaN or infinity, whose product with 0 is not 0.
        value = v.value.float().masked_fill(~v.valid[..., None], 0.0)
        output = weight @ value
        lost = torch.empty(batch, heads, v.model.group, n, device=value.device)
        block = max(1, _BLOCK // (heads * rows[1]))
        for start in range(0, n, block):
            part = slice(start, start + block)
            term = self._term(query, v.key[:, :, part].float(), value[:, :, part], output)
            term = weight[..., part].square() * term
            lost[..., part] = term.unflatten(2, (v.model.group, self.window)).sum(3)
        return lost.flatten(1, 2)

    def _term(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> Tensor:
        """The factor of `A^2`, `[B, H, G * window, m]`, from scaled queries and `m` entries."""
        value_square = value.square().sum(-1)[:, :, None]
        if self.variant == "value":
            return value_square
        z = query @ key.transpose(-1, -2)
        cross = output @ value.transpose(-1, -2)
        output_square = output.square().sum(-1, keepdim=True)
        if self.variant == "key":
            return z.square() * (value_square - 2 * cross + output_square).clamp(min=0.0)
        # || v + z (v - o) ||^2 = || (1 + z) v - z o ||^2
        grown = 1 + z
        square = grown.square() * value_square - 2 * z * grown * cross + z.square() * output_square
        return square.clamp(min=0.0)


OBCACHE = Policy(
    name="obcache",
    score=OutputAware(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the entries that change the last 32 queries' outputs most, to second order",
    paper="arXiv 2510.07651",
    cost="time O(H_q w T d), memory O(H_q w T)",
)
