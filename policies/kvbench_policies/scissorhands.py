"""Scissorhands: evicts entries that got below-average attention from most recent queries.

Liu, Desai, Liao, Wang, Xie, Xu, Kyrillidis, Shrivastava: Scissorhands: Exploiting the Persistence of Importance
Hypothesis for LLM KV Cache Compression at Test Time, arXiv 2305.17118, Algorithm 2. The authors have released no code.
The paper's drop amount is `buffer` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.moments import LATER
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Need, Policy, Queries, Range, Score, Scores, View, protect_window
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class Persistence(Score):
    """Negated number of the last `history` queries that gave an entry below-average attention.

        s_i = -#{ q in history, q >= i : A[q, i] < 1 / (q + 1) }

    `q` and `i` are positions: the query at `q` sees `q + 1` tokens, so `1 / (q + 1)` is its average attention. Only
    queries that can see an entry count. Ties are frequent; the more recent token stays.

    Attributes:
        history: Number of last queries to count.
        window: Number of newest tokens that are protected.
        group: Reduction of the counts over the query heads of a KV head: `mean`, `max` (the head with the fewest misses
            decides) or `sum`.
    """

    name: ClassVar[str] = "persistence"
    searched: ClassVar[Mapping[str, Range]] = {"history": Range(50, 800, log=True), "window": Range(0, 64)}
    history: int = 400
    window: int = 10
    group: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self) -> None:
        check_count("history", self.history, 1)
        check_count("window", self.window, 0)

    @property
    def needs(self) -> frozenset[Need]:
        """The last `history` queries."""
        return frozenset({Queries(self.history)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        # At the first eviction step, there are no more queries than columns.
        query_count = self.history if v.moment in LATER else min(self.history, v.shape[2])
        offsets = torch.arange(query_count - 1, -1, -1, device=v.col.device)
        # Number of tokens that each query can see
        visible_counts = (v.length[:, None] - offsets)[:, None, :, None]
        can_attend = (v.position[:, :, None, :] < visible_counts).repeat_interleave(v.model.group, 1)
        below_average = v.window_attention(self.history, query_count) < 1 / visible_counts.clamp(min=1)
        miss_counts = -(below_average & can_attend).sum(2).float()
        return Scores(v.grouped(miss_counts, self.group), protect_window(v, self.window))


SCISSORHANDS = Policy(
    name="scissorhands",
    score=Persistence(),
    allocate=Uniform(),
    select=TopK(),
    summary="evicts entries that got below-average attention from most of the last 400 queries",
    paper="arXiv 2305.17118, Algorithm 2",
    moments=("context", "question", "decode"),
    cost="time O(H_q w T d), memory O(H_q w T) for a history of w",
)
