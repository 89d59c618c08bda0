"""LagKV: keeps the entries that vary most relative to the range of the next partition.

Liang, Zhang, Li, Li: LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, arXiv
2504.04704. 16 sinks as in the authors' code; a lag of 128 as in its README and in kvpress (which keeps 4 sinks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Range, Score, Scores, View, protect_sinks, protect_window
from kvbench_policies.blocks import from_blocks, in_blocks, order_of
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class LagRelative(Score):
    """Spread of an entry's channels relative to their range in the next partition.

    The entries after the sinks are split into partitions of `lag`. With the minimum and maximum of every channel in the
    next partition, `min` and `max`:

        s_i = softmax_i( std_c( (k_ic - min_c) / (max_c - min_c) ) ) + the same of the values

    with the sample standard deviation over channels and the softmax over the partition. The final score is the entry's
    rank within its partition, from 0 to `1 - 1/lag`, so every partition loses the same fraction of its entries. The
    last full partition and all later entries have no next partition and are protected like a window. A channel that is
    constant in the next partition counts as 0.

    Attributes:
        lag: Entries per partition.
        sinks: Number of protected first tokens.
        cross: Compare raw values across partitions instead of ranks within each (for allocators that compare heads).
    """

    name: ClassVar[str] = "lagkv"
    searched: ClassVar[Mapping[str, Range]] = {"lag": Range(8, 256, log=True), "sinks": Range(0, 32)}
    nonnegative: ClassVar[bool] = True
    lag: int = 128
    sinks: int = 16
    cross: bool = False

    def __post_init__(self) -> None:
        check_count("lag", self.lag, 1, "entries")
        check_count("sinks", self.sinks, 0)

    def reserved(self, length: int) -> int:
        """Return the size of the sinks, the last full partition and all later entries."""
        partitions = max(0, length - self.sinks) // self.lag
        return length - max(0, partitions - 1) * self.lag

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 where they are protected."""
        partitioned = v.valid & (v.position >= self.sinks)
        column_order = order_of(partitioned)
        full_counts = partitioned.sum(-1, keepdim=True) // self.lag
        ordinals = partitioned.cumsum(-1) - 1
        rated_mask = partitioned & (ordinals < (full_counts - 1) * self.lag)
        key_spread, value_spread = (
            self._spread(in_blocks(tensor, partitioned, column_order, self.lag)) for tensor in (v.key, v.value)
        )
        scores = key_spread + value_spread
        if not self.cross:
            # A stable sort ranks the more recent of equal entries higher.
            ranks = scores.argsort(dim=-1, stable=True).argsort(dim=-1)
            scores = ranks.float() / self.lag
        scores = from_blocks(scores, column_order).masked_fill(~rated_mask, 0.0)
        window_class = torch.where(rated_mask, 0, protect_window(v, v.length))
        return Scores(scores, torch.maximum(window_class, protect_sinks(v, self.sinks)).to(torch.int8))

    def _spread(self, blocks: Tensor) -> Tensor:
        """Score every entry within its block, `[B, H, P, lag, d]` to `[B, H, P, lag]`."""
        following = blocks.roll(-1, 2)  # the last block is protected, so its wrap-around does not matter
        minimum, maximum = following.amin(3, keepdim=True), following.amax(3, keepdim=True)
        value_range = maximum - minimum
        scaled = ((blocks - minimum) / torch.where(value_range > 0, value_range, 1.0)).masked_fill(
            value_range <= 0, 0.0
        )
        return scaled.std(-1).softmax(-1)


LAGKV = Policy(
    name="lagkv",
    score=LagRelative(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps what varies most relative to the next 128 entries, plus sinks and a window",
    paper="arXiv 2504.04704",
    moments=("context", "question", "decode", "chunked"),
    cost="time and memory O(H T d)",
)
