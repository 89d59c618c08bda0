"""Rows of packed layers: where segments begin, which rows they own, and gathers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x`, `[B, H, n, ...]`, by their index among `B * H * n`."""
    with torch.inference_mode(False):  # later forwards write to them in any mode
        out = torch.empty(len(index), *x.shape[3:], dtype=x.dtype, device=x.device)
    return torch.index_select(x.detach().flatten(0, 2), 0, index, out=out)


def starts(room: Sequence[int]) -> list[int]:
    """First row of every segment if the segments are adjacent."""
    return [0, *accumulate(room)][: len(room)]


def runs(start: Sequence[int], length: Sequence[int], device: torch.device) -> Tensor:
    """Concatenate the ranges `start[s] .. start[s] + length[s]`, int64."""
    total = sum(length)
    count = torch.tensor(length, dtype=torch.int64, device=device)
    first = torch.tensor(start, dtype=torch.int64, device=device)
    before = count.cumsum(0) - count
    shift = torch.repeat_interleave(first - before, count, output_size=total)
    return torch.arange(total, device=device) + shift
