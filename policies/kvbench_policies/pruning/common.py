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
        stays = v.visual & ~v.pruned
        text = (v.valid & ~v.visual).to(torch.int8) * Scores.WINDOW
        return Scores(stays.float(), text)


def top(values: Tensor, count: int) -> Tensor:
    """The `count` largest values, as a mask `[V]`; ties go to the earlier token."""
    keep = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    keep[values.float().argsort(descending=True, stable=True)[:count]] = True
    return keep


def similarity(a: Tensor, b: Tensor) -> Tensor:
    """Cosine similarity of every row of `a` `[n, d]` with every row of `b` `[m, d]`, `[n, m]`."""
    unit = torch.nn.functional.normalize
    return unit(a.float(), dim=-1) @ unit(b.float(), dim=-1).T
