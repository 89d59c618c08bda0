"""Reference implementation of `global_select` in plain loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def global_select(
    score: Tensor, position: Tensor, valid: Tensor, count: Tensor, protect: Tensor | None = None
) -> Tensor:
    """Sort the entries of every sequence and keep the first `count`; shapes as in `op.py`.

    Protected entries come first, ordered by class and within a class by recency (class 1 by score; class 3, the sinks,
    by ascending position). The others follow by score; ties go to the more recent entry, then to the lower head.
    """
    keep_mask = torch.zeros(score.shape, dtype=torch.bool)
    for batch_index in range(score.shape[0]):

        def rank_key(entry: Sequence[int], batch_index: int = batch_index) -> tuple[float, ...]:
            row_index, entry_index = entry
            entry_class = 0 if protect is None else int(protect[batch_index, row_index, entry_index])
            score_value = float(score[batch_index, row_index, entry_index]) if entry_class <= 1 else 0.0
            column = int(position[batch_index, row_index, entry_index])
            return -entry_class, -score_value, column if entry_class == 3 else -column, row_index

        for row_index, entry_index in sorted(valid[batch_index].nonzero().tolist(), key=rank_key)[
            : int(count[batch_index])
        ]:
            keep_mask[batch_index, row_index, entry_index] = True
    return keep_mask
