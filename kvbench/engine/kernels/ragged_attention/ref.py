"""Reference attention over ragged segments, the oracle of the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.view.softmax import cap_of, sinks_of


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    col: Tensor,
    start: Tensor,
    length: Tensor,
    first: int,
    scale: float,
    powers: Sequence[int] = (),
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend query by query, each to the entries whose column is not after its own.

    A query without such an entry, and any query of an empty segment, has the output 0.

    Args:
        query: `[B, H_q, n, d]`; query `i` has the logical column `first + i`.
        key, value: `[rows, d]`, of the same dtype.
        col: Logical column of every row, `[rows]`.
        start, length: First row and number of rows of every segment `b * H + h`, `[B, H, 1]`.
        first: Logical column of the first query.
        scale: Scaling factor of the logits, with a soft cap and sinks if the family has them.
        powers: Powers of the weights to sum over the queries.
        valid: Queries whose weights are summed, bool `[B, n]`; None: all.

    Returns:
        Output `[B, H_q, n, d]` and accumulated attention `[powers, entries, G]`, segment by segment, both in the dtype
        of the input (float64 for checks).
    """
    batch_size, query_heads, query_count, _ = query.shape
    kv_heads = length.shape[1]
    group_size = query_heads // kv_heads
    cap, sinks = cap_of(scale), sinks_of(scale)
    output = torch.zeros_like(query)
    segment_sums = []
    for batch_index in range(batch_size):
        for head_index in range(kv_heads):
            segment_rows = slice(
                int(start[batch_index, head_index]),
                int(start[batch_index, head_index] + length[batch_index, head_index]),
            )
            power_sums = query.new_zeros(len(powers), segment_rows.stop - segment_rows.start, group_size)
            for group_index in range(group_size):
                for query_index in range(query_count):
                    is_visible = col[segment_rows] <= first + query_index
                    if not bool(is_visible.any()):
                        continue
                    logits = (
                        key[segment_rows]
                        @ query[batch_index, head_index * group_size + group_index, query_index]
                        * scale
                    )
                    if cap is not None:
                        logits = cap * torch.tanh(logits / cap)
                    logits = logits.masked_fill(~is_visible, -torch.inf)
                    if sinks is not None:  # one more entry, which has no value
                        logits = torch.cat([logits, sinks[None, head_index * group_size + group_index].to(logits)])
                    weights = logits.softmax(0)[: len(is_visible)]
                    output[batch_index, head_index * group_size + group_index, query_index] = (
                        weights @ value[segment_rows]
                    )
                    if valid is None or bool(valid[batch_index, query_index]):
                        for power_index, power in enumerate(powers):
                            power_sums[power_index, :, group_index] += weights**power
            segment_sums.append(power_sums)
    return output, torch.cat(segment_sums, 1)
