"""Rows of packed layers: segment offsets, row ranges, and gathers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def gathered(tensor: Tensor, row_indices: Tensor) -> Tensor:
    """Gather rows of `tensor`, `[B, H, n, ...]`, by their index among `B * H * n`."""
    with torch.inference_mode(False):  # later forwards write to them in any mode
        gathered_rows = torch.empty(len(row_indices), *tensor.shape[3:], dtype=tensor.dtype, device=tensor.device)
    return torch.index_select(tensor.detach().flatten(0, 2), 0, row_indices, out=gathered_rows)


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
