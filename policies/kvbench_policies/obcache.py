"""OBCache: scores entries by the second-order change of the attention output without them.

Gu, Liang, Zhao, Diao: OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM Inference, arXiv
2510.07651. The three scores are derived here from the description in the abstract: the squared change of a query's
output, expanded to second order, when an entry's value, its logit or both are set to 0.
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
"""Elements (query heads x queries x entries) per block and sequence."""


@dataclass(frozen=True)
class OutputAware(WindowScore):
    """Squared change of the window queries' outputs without an entry, to second order.

    With scaled logit `z`, attention `A` over all visible entries, and output `o_q = sum_i A v_i`:

        joint   s_i = sum_q A[q, i]^2 || v_i + z[q, i] (v_i - o_q) ||^2
        value   s_i = sum_q A[q, i]^2 || v_i ||^2
        key     s_i = sum_q (A[q, i] z[q, i])^2 || v_i - o_q ||^2

    summed over the queries of the last `window` tokens, which are protected, and over the group. The norms are
    expanded, so no vector per (query, entry) is materialised.

    Attributes:
        variant: Quantity set to 0: the value (`value`), the logit (`key`) or both (`joint`).
        window: Number of observing queries, in tokens.
        kernel: Odd width of the pooling over the past, in entries; 1 disables pooling.
        pool: `max` or `avg`, zero-padded.
        group: Reduction over the query heads of a KV head: `sum`, `mean` or `max`.
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
        scores = v.grouped(self._lost(v), self.group).masked_fill(~before_window, 0.0)
        scores = self.pooled(scores, self.pool)
        return Scores(scores.masked_fill(~before_window, 0.0), protect_window(v, self.window))

    def _lost(self, view: View) -> Tensor:
        """Return the output change summed over the window's queries, float32 `[B, H_q, n]`."""
        batch_size, head_count, entry_count = view.shape
        row_shape = (head_count, view.model.group * self.window)
        attention = view.window_attention(self.window).reshape(batch_size, *row_shape, entry_count)
        queries = view.obs[Queries(self.window)].float().reshape(batch_size, *row_shape, -1) * view.scale
        # Padding has weight 0, but 0 times NaN or infinity is not 0.
        values = view.value.float().masked_fill(~view.valid[..., None], 0.0)
        outputs = attention @ values
        output_loss = torch.empty(batch_size, head_count, view.model.group, entry_count, device=values.device)
        block_size = max(1, _BLOCK // (head_count * row_shape[1]))
        for block_start in range(0, entry_count, block_size):
            block_slice = slice(block_start, block_start + block_size)
            loss_terms = self._term(queries, view.key[:, :, block_slice].float(), values[:, :, block_slice], outputs)
            loss_terms = attention[..., block_slice].square() * loss_terms
            output_loss[..., block_slice] = loss_terms.unflatten(2, (view.model.group, self.window)).sum(3)
        return output_loss.flatten(1, 2)

    def _term(self, queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor) -> Tensor:
        """Return the factor of `A^2`, `[B, H, G * window, m]`, for scaled queries and `m` entries."""
        value_square = values.square().sum(-1)[:, :, None]
        if self.variant == "value":
            return value_square
        logits = queries @ keys.transpose(-1, -2)
        cross_terms = outputs @ values.transpose(-1, -2)
        output_square = outputs.square().sum(-1, keepdim=True)
        if self.variant == "key":
            return logits.square() * (value_square - 2 * cross_terms + output_square).clamp(min=0.0)
        # || v + z (v - o) ||^2 = || (1 + z) v - z o ||^2
        grown_logits = 1 + logits
        squares = (
            grown_logits.square() * value_square
            - 2 * logits * grown_logits * cross_terms
            + logits.square() * output_square
        )
        return squares.clamp(min=0.0)


OBCACHE = Policy(
    name="obcache",
    score=OutputAware(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the entries whose removal would change the last 32 queries' outputs most (second order)",
    paper="arXiv 2510.07651",
    cost="time O(H_q w T d), memory O(H_q w T)",
)
