"""R-KV: attention of the last queries minus the redundancy of an entry's key.

Cai, Xiao, Sun, Luo, Zhang, Wan, Li, Zhou, Chang, Gu, Dong, Anandkumar, Asi, Hu: R-KV: Redundancy-aware KV Cache
Compression for Reasoning Models, arXiv 2505.24133. lambda = 0.1 as in the paper and the repository's README (the code's
default is 0.07).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Queries, Range, Scores, View, protect_window
from kvbench.view.softmax import capped
from kvbench_policies.ranges import check_share
from kvbench_policies.windows import WindowScore

_SIMILAR = 0.5
"""Cosine above which keys count as similar."""

_BLOCK = 1 << 22
"""Cosines in memory per sequence."""


@dataclass(frozen=True)
class Redundancy(WindowScore):
    """`s_i = lambda * maxpool(a_i) - (1 - lambda) * R_i` over the tokens before the window.

    R-KV has its own attention `a`: the window's logits (with the model's soft cap) are reduced over the group, the
    softmax is over the past alone, without attention sinks, which belong to single query heads, and its mean over the
    window's queries is max-pooled over the past.

        R_j = softmax_j( mean_i c_ij ),    c_ij = cos(k_i, k_j)

    with `i` and `j` in the past, `c_ii = 0`, and for each `i`, `c_ij = 0` for the most recent similar `j`
    (`c_ij > 0.5`), which is thus spared. Computed in blocks of rows `i`: the `T x T` matrix is never in memory, but
    costs `2 H T^2 d` flops.

    Attributes:
        redundancy: Weight of `R`, the paper's `1 - lambda`.
        window: Number of observing queries, in tokens; these tokens are protected.
        kernel: Odd width of the pooling, in entries; 1 disables pooling.
        group: Reduction of the logits over the query heads of a KV head: `max` or `mean`.
        variant: `paper`, or `release` (the authors' code): `R` is computed over the past and the window together, and a
            row `i` without a similar `j` spares the oldest entry.
    """

    name: ClassVar[str] = "rkv"
    searched: ClassVar[Mapping[str, Range]] = {**WindowScore.searched, "redundancy": Range(0.0, 1.0)}
    redundancy: float = 0.9
    window: int = 8
    group: Literal["max", "mean"] = "max"
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("redundancy", self.redundancy)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the window."""
        before_window = self.past(v)
        scores = (1 - self.redundancy) * self._attention(v, before_window)
        if self.variant == "release":
            repeats = repetition(v.key, v.valid, spare_oldest=True)
        else:
            repeats = repetition(v.key, before_window)
        scores = scores - self.redundancy * repeats
        return Scores(scores.masked_fill(~before_window, 0.0), protect_window(v, self.window))

    def _attention(self, view: View, before_window: Tensor) -> Tensor:
        """Return the pooled attention of the window on the past, float32 `[B, H, n]`."""
        batch_size, head_count, entry_count = view.shape
        queries = view.obs[Queries(self.window)].float() * view.scale
        queries = queries.reshape(batch_size, head_count, view.model.group * self.window, -1)
        logits = capped(queries @ view.key.float().transpose(-1, -2), view.scale)
        logits = logits.view(batch_size, -1, self.window, entry_count)
        # If there is a past, the window is full, and all of its queries see all of the past.
        logits = view.grouped(logits, self.group).masked_fill(~before_window[:, :, None], float("-inf"))
        attention = torch.softmax(logits, -1).nan_to_num(0.0).mean(2)
        return self.pooled(attention, "max")


def repetition(keys: Tensor, entry_mask: Tensor, spare_oldest: bool = False) -> Tensor:
    """Return the redundancy of every key, `R` of `Redundancy`.

    Args:
        keys: Keys, `[B, H, n, d]`, in the order of their tokens.
        entry_mask: Entries to compare, bool `[B, H, n]`; the others are ignored.
        spare_oldest: Rows without a similar key spare the oldest entry instead of none.

    Returns:
        float32 `[B, H, n]`, summing to 1 over the compared entries of a head; 0 elsewhere.
    """
    _, head_count, entry_count = entry_mask.shape
    unit_keys = normalize(keys.float(), dim=-1).masked_fill(~entry_mask[..., None], 0.0)
    columns = torch.arange(entry_count, device=keys.device)
    default_column = entry_mask.int().argmax(-1)[..., None, None] if spare_oldest else -1
    cosine_sums = torch.zeros(entry_mask.shape, device=keys.device)
    block_size = max(1, _BLOCK // (head_count * entry_count))
    for block_start in range(0, entry_count, block_size):
        row_indices = columns[block_start : block_start + block_size, None]
        cosines = unit_keys[:, :, block_start : block_start + block_size] @ unit_keys.transpose(-1, -2)
        cosines = cosines.masked_fill_(row_indices == columns, 0.0)
        spared_column = torch.where(cosines > _SIMILAR, columns, default_column).amax(-1, keepdim=True)
        cosine_sums += cosines.masked_fill_(columns == spared_column, 0.0).sum(2)
    mean_cosines = cosine_sums / entry_mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.softmax(mean_cosines.masked_fill(~entry_mask, float("-inf")), -1).nan_to_num(0.0)


RKV = Policy(
    name="rkv",
    score=Redundancy(),
    allocate=Uniform(),
    select=TopK(),
    summary="attention of the last 8 queries minus the redundancy of an entry's key",
    paper="arXiv 2505.24133",
    buffer=128,
    moments=("decode",),
    cost="time O(H T^2 d), memory O(H_q w T) and a block of T x T",
)
