"""What the methods that prune visual tokens share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.plugin import Score, Scores, View


@dataclass(frozen=True)
class PrunesVisual(Score):
    """Keeps all text and the visual tokens that the prefill has not pruned.

    A budget of `visual:64` is what the papers mean by 64 visual tokens. Any other budget is spent
    on text first; if it cannot hold all text, the oldest text tokens give way.
    """

    def score(self, v: View) -> Scores:
        """Rate the entries of one layer, `[B, H, n]`: 1 for visual tokens that stay."""
        surviving = v.visual & ~v.pruned
        text_class = (v.valid & ~v.visual).to(torch.int8) * Scores.WINDOW
        return Scores(surviving.float(), text_class)


def top(values: Tensor, count: int) -> Tensor:
    """The `count` largest values, as a mask `[V]`; ties go to the earlier token."""
    top_mask = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    top_mask[values.float().argsort(descending=True, stable=True)[:count]] = True
    return top_mask


def similarity(first_rows: Tensor, second_rows: Tensor) -> Tensor:
    """Cosine similarity of `first_rows` `[n, d]` with `second_rows` `[m, d]`, `[n, m]`."""
    normalise = torch.nn.functional.normalize
    return normalise(first_rows.float(), dim=-1) @ normalise(second_rows.float(), dim=-1).T
