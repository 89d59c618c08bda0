"""Attention over ragged segments written plainly: the oracle of its tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
        scale: Factor of the logits.
        powers: Powers of the weights to sum over the queries.
        valid: Queries whose weights are summed, bool `[B, n]`; None: all.

    Returns:
        Output `[B, H_q, n, d]` and mass `[powers, entries, G]`, segment by segment, both in the
        dtype of the input (float64 for checks).
    """
    batch, query_heads, n, _ = query.shape
    heads = length.shape[1]
    group = query_heads // heads
    out = torch.zeros_like(query)
    mass = []
    for b in range(batch):
        for h in range(heads):
            rows = slice(int(start[b, h]), int(start[b, h] + length[b, h]))
            total = query.new_zeros(len(powers), rows.stop - rows.start, group)
            for g in range(group):
                for i in range(n):
                    seen = col[rows] <= first + i
                    if not bool(seen.any()):
                        continue
                    logits = key[rows] @ query[b, h * group + g, i] * scale
                    weight = logits.masked_fill(~seen, -torch.inf).softmax(0)
                    out[b, h * group + g, i] = weight @ value[rows]
                    if valid is None or bool(valid[b, i]):
                        for k, power in enumerate(powers):
                            total[k, :, g] += weight**power
            mass.append(total)
    return out, torch.cat(mass, 1)
