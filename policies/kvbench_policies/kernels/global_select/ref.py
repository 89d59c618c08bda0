"""`global_select` as plain loops: the oracle of its tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_select(
    score: Tensor, position: Tensor, valid: Tensor, count: Tensor, protect: Tensor | None = None
) -> Tensor:
    """Sort the entries of every sequence and keep the first `count`; shapes as in `op.py`.

    Protected entries come first, by class, and within a class by recency (class 1 by score; class
    3, the sinks, by position from the first on). The others follow by score; ties go to the more
    recent entry, then to the lower head.
    """
    keep = torch.zeros(score.shape, dtype=torch.bool)
    for b in range(score.shape[0]):

        def worth(entry: Sequence[int], b: int = b) -> tuple[float, ...]:
            k, i = entry
            of_class = 0 if protect is None else int(protect[b, k, i])
            value = float(score[b, k, i]) if of_class <= 1 else 0.0
            place = int(position[b, k, i])
            return -of_class, -value, place if of_class == 3 else -place, k

        for k, i in sorted(valid[b].nonzero().tolist(), key=worth)[: int(count[b])]:
            keep[b, k, i] = True
    return keep
