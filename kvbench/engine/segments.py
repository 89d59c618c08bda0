"""Rows of packed layers: segment offsets, row ranges, gathers of rows, and the tokens that a forward adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def gathered(tensor: Tensor, row_indices: Tensor) -> Tensor:
    """Gather rows of `tensor`, `[B, H, n, ...]`, by their index among `B * H * n`."""
    with torch.inference_mode(False):  # later forwards write to them in any mode
        gathered_rows = torch.empty(len(row_indices), *tensor.shape[3:], dtype=tensor.dtype, device=tensor.device)
    return torch.index_select(tensor.detach().flatten(0, 2), 0, row_indices, out=gathered_rows)


def marked(mask: Tensor) -> Tensor:
    """Return the indices of what is true in a mask of one axis, int64."""
    if mask.device.type == "cpu":  # numpy takes a fifth of the time
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().squeeze(-1)


def starts(capacities: Sequence[int]) -> list[int]:
    """Return the first row of every segment if the segments are adjacent."""
    return [0, *accumulate(capacities)][: len(capacities)]


def runs(range_starts: Sequence[int], range_lengths: Sequence[int], device: torch.device) -> Tensor:
    """Concatenate the ranges `start[s] .. start[s] + length[s]`, int64."""
    total_length = sum(range_lengths)
    length_tensor = torch.tensor(range_lengths, dtype=torch.int64, device=device)
    start_tensor = torch.tensor(range_starts, dtype=torch.int64, device=device)
    preceding = length_tensor.cumsum(0) - length_tensor
    offsets = torch.repeat_interleave(start_tensor - preceding, length_tensor, output_size=total_length)
    return torch.arange(total_length, device=device) + offsets


def ranks_of_tokens(mask: Tensor) -> Tensor:
    """Return the index of every column among the tokens of its row, int64; 0 for padding before them.

    Args:
        mask: Columns that are tokens, bool `[B, n]`.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


@dataclass
class SegmentTokens:
    """New tokens as segments receive them; a segment is one sequence and KV head.

    Attributes:
        counts: New tokens of every segment, on the CPU.
        ranks: Index of every column among the new tokens of its sequence, int64 `[B, 1, n]`.
        added: New tokens of every segment: an int, or int64 `[B, 1, 1]`.
        indices: The tokens among all `B * H * n` columns, int64; None: all.
        columns: Logical columns of the tokens, int32.
    """

    counts: list[int]
    ranks: Tensor
    added: int | Tensor
    indices: Tensor | None
    columns: Tensor


@dataclass
class NewTokens:
    """New tokens of a batch. What layers need of them is computed once for all layers.

    Attributes:
        mask: New columns that are tokens, bool `[B, n]`; None: all of them.
        counts: Number of new tokens of every sequence, on the CPU.
        ranks: Index of every column among the new tokens of its sequence, int64 `[B, n]`.
        first_column: Logical column of the first of them.
    """

    mask: Tensor | None
    counts: list[int]
    ranks: Tensor
    first_column: int
    _segments: dict[tuple[int, torch.device], SegmentTokens] = field(default_factory=dict)

    @classmethod
    def everywhere(cls, batch_size: int, count: int, first_column: int, device: torch.device) -> NewTokens:
        """Return as many tokens for every sequence."""
        ranks = torch.arange(count, device=device).expand(batch_size, count)
        return cls(None, [count] * batch_size, ranks, first_column)

    @classmethod
    def where(cls, mask: Tensor, first_column: int, counts: list[int] | None = None) -> NewTokens:
        """Return the tokens of columns padded on the left, bool `[B, n]`; `counts` of its rows if they are known."""
        return cls(mask, mask.sum(-1).tolist() if counts is None else counts, ranks_of_tokens(mask), first_column)

    def for_segments(self, heads: int, device: torch.device) -> SegmentTokens:
        """Return the tokens as a layer of so many KV heads receives them."""
        key = (heads, device)
        if key not in self._segments:
            batch_size, column_count = self.ranks.shape
            shape = (batch_size, heads, column_count)
            end_column = self.first_column + column_count
            columns = torch.arange(self.first_column, end_column, dtype=torch.int32, device=device)
            columns = columns.expand(shape).reshape(-1)
            indices: Tensor | None = None
            added: int | Tensor = column_count
            if self.mask is not None:
                mask = self.mask.to(device)
                indices = marked(mask[:, None].expand(shape).reshape(-1))
                columns, added = columns[indices], mask.sum(-1)[:, None, None]
            counts = [count for count in self.counts for _ in range(heads)]
            self._segments[key] = SegmentTokens(counts, self.ranks.to(device)[:, None], added, indices, columns)
        return self._segments[key]
