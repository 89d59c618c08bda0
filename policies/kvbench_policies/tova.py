"""TOVA: keeps what the last query attends to, averaged over all heads of a layer.

Oren, Hassid, Yarden, Adi, Schwartz: Transformers are Multi-State RNNs, arXiv 2401.06104.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Need, Policy, Queries, Score, View


@dataclass(frozen=True)
class LastAttention(Score):
    """Attention of the newest token's query, averaged over all `H_q` query heads of the layer.

        s_i = mean_g A_g[t, i]

    A token has the same score in every KV head that holds it, so heads with equal budgets keep the same tokens. A head
    that has evicted the token contributes 0. Nothing is protected: the newest token stays only if its attention is
    large enough.
    """

    name: ClassVar[str] = "tova"
    nonnegative: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Need]:
        """The last query."""
        return frozenset({Queries(1)})

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        attention = v.grouped(v.window_attention(1)[:, :, 0], "sum")
        summed_attention = sum_over_holders(attention, v.position, v.valid)
        return summed_attention / v.model.query_heads


def sum_over_holders(values: Tensor, positions: Tensor, valid_mask: Tensor) -> Tensor:
    """Sum a value over the KV heads that hold the same token.

    Every token is summed once, in the order of the heads, so its sum is bit-identical in all of them. Uses `H * H * n`
    numbers of memory per sequence.

    Args:
        values: `[B, H, n]`.
        positions: Logical position of every entry, int64 `[B, H, n]`; a head holds a token once.
        valid_mask: Entries that exist, bool `[B, H, n]`; the others are ignored.

    Returns:
        The sums, `[B, H, n]`; 0 where there is no entry.
    """
    batch_size, head_count, entry_count = values.shape
    ordered, sort_order = positions.masked_fill(~valid_mask, -1).flatten(1).sort(dim=-1, stable=True)
    run_starts = torch.nn.functional.pad(ordered.diff(dim=-1) != 0, (1, 0))
    # Tokens are numbered from 0 by position; missing entries share a number.
    run_indices = torch.empty_like(sort_order).scatter_(-1, sort_order, run_starts.long().cumsum(-1))
    head_runs = run_indices.view(batch_size, head_count, entry_count)
    scattered = values.new_zeros(batch_size, head_count, head_count * entry_count)
    scattered.scatter_(-1, head_runs, values)  # each token has its own column
    return (
        scattered.sum(1).gather(-1, run_indices).view(batch_size, head_count, entry_count).masked_fill(~valid_mask, 0.0)
    )


TOVA = Policy(
    name="tova",
    score=LastAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps what the last query attends to, averaged over all heads of a layer",
    paper="arXiv 2401.06104",
    moments=("context", "question", "decode"),
    cost="time O(H_q T d), memory O(H^2 T)",
)
