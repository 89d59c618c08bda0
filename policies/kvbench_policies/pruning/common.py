"""Helpers for methods that prune visual tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.plugin import Score, Scores, View


@dataclass(frozen=True)
class PrunesVisual(Score):
    """Base score that keeps all text and the visual tokens not pruned during the prefill.

    A budget of `visual:64` corresponds to 64 visual tokens in the papers. Any other budget goes to text first; if it
    cannot hold all text, the oldest text tokens are dropped.
    """

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, `[B, H, n]`: 1 for visual tokens that were not pruned."""
        surviving = v.visual & ~v.pruned
        text_class = (v.valid & ~v.visual).to(torch.int8) * Scores.WINDOW
        return Scores(surviving.float(), text_class)


def top(values: Tensor, count: int) -> Tensor:
    """Return a mask `[V]` of the `count` largest values; ties go to the earlier token."""
    top_mask = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    top_mask[values.float().argsort(descending=True, stable=True)[:count]] = True
    return top_mask


def similarity(first_rows: Tensor, second_rows: Tensor) -> Tensor:
    """Return the cosine similarity of `first_rows` `[n, d]` and `second_rows` `[m, d]`, `[n, m]`."""
    normalise = torch.nn.functional.normalize
    return normalise(first_rows.float(), dim=-1) @ normalise(second_rows.float(), dim=-1).T
