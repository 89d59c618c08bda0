"""SnapKV: attention of the last queries on the context, pooled over neighbours.

Li, Huang, Yang, Venkitesh, Locatelli, Ye, Cai, Lewis, Chen: SnapKV: LLM Knows What You are Looking
for Before Generation, arXiv 2404.14469, section 4 and Listing 1. CriticalKV's and AdaKV's
experiments use a window of 32 and max pooling of size 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Scores, View, protect_window
from kvbench_policies.windows import WindowScore


@dataclass(frozen=True)
class WindowAttention(WindowScore):
    """Attention from the queries of the last `window` tokens to the tokens before them.

        s_i = pool( reduce_{g in group}( mean_{q in window} A_g[q, i] ) )   for i < T - window

    The softmax is in float32 over the whole context, causal within the window. The query heads of a KV head are reduced
    BEFORE pooling. The window's own columns are removed before pooling and are protected. Pooling covers only the past,
    which is zero-padded at the start of the sequence and at the window; average pooling includes these zeros.

    Attributes:
        window: Number of observing queries, in tokens.
        kernel: Odd width of the pooling, in entries; 1 disables pooling.
        pool: `max` or `avg`.
        group: Reduction over the query heads of a KV head: `mean`, `max` or `sum`.
    """

    name: ClassVar[str] = "window"
    nonnegative: ClassVar[bool] = True
    pool: Literal["max", "avg"] = "max"
    group: Literal["mean", "max", "sum"] = "mean"

    def reserved(self, length: int) -> int:
        """Return the window size."""
        return self.window

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the window."""
        attention = v.window_attention_sum(self.window) / self.window
        before_window = self.past(v)
        scores = v.grouped(attention, self.group).masked_fill(~before_window, 0.0)
        scores = self.pooled(scores, self.pool).masked_fill(~before_window, 0.0)
        return Scores(scores, protect_window(v, self.window))


SNAPKV = Policy(
    name="snapkv",
    score=WindowAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the last 32 tokens and what their queries attend to, max-pooled over neighbours",
    paper="arXiv 2404.14469, section 4",
    moments=("context", "question", "decode"),
    cost="time O(H_q w T d), memory O(H_q w T + H T d)",
)
