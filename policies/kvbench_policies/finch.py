"""FINCH: keeps what the question attends to, in every chunk of the prompt.

Corallo, Papotti: FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models, TACL 2024, arXiv
2408.00167. As in kvpress, the whole prompt is prefilled at once, and every chunk keeps its part of the budget. The
paper prefills one chunk at a time, each followed by the question, and moves the kept keys to adjacent positions; here
keys keep their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform, apportion, best, order_key
from kvbench.plugin import Need, Policy, Queries, Range, Score, Scores, View, protect_window
from kvbench_policies.merging import sum_into
from kvbench_policies.ranges import check_count
from kvbench_policies.tova import sum_over_holders


@dataclass(frozen=True)
class QuestionAttention(Score):
    """Attention from the question's tokens, relative to uniform attention.

        s_i = mean_g mean_{q in question} (q + 1) A_g[q, i]

    `q` is a position, so the query sees `q + 1` tokens and gives each `1 / (q + 1)` on average. The question is
    protected. If the cache holds no question (moments `context` and `turns`, and later eviction steps), the last
    `window` tokens are used instead. The authors' code computes these weights, too, but then overwrites the weighted
    attention, so all queries count equally. kvpress weights with `q` instead of `q + 1`.

    Attributes:
        longest: Maximum number of queries; a longer question contributes its last ones.
        window: Number of last tokens that replace a missing question.
        variant: `paper`: every KV head separately, as in kvpress; `release` (the authors' code): without the factor
            `q + 1`, summed over all heads of the layer, so that heads with equal budgets keep the same tokens.
    """

    name: ClassVar[str] = "question_attention"
    searched: ClassVar[Mapping[str, Range]] = {"window": Range(2, 128, log=True)}
    nonnegative: ClassVar[bool] = True
    longest: int = 256
    window: int = 32
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        check_count("longest", self.longest, 1)
        check_count("window", self.window, 1)

    @property
    def version(self) -> int:
        """2 for `variant=release`: version 1 had the factor `q + 1`."""
        return 2 if self.variant == "release" else 1

    @property
    def needs(self) -> frozenset[Need]:
        """The last queries."""
        return frozenset({Queries(self.longest)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the question."""
        query_count = min(v.asked or self.window, self.longest)
        attention = v.window_attention(self.longest, query_count)
        if self.variant == "release":
            scores = sum_over_holders(v.grouped(attention.mean(2)), v.position, v.valid)
        else:
            offsets = torch.arange(query_count - 1, -1, -1, device=v.col.device)
            visible_counts = (v.length[:, None] - offsets).clamp(min=0)[:, None, :, None]
            scores = v.grouped((attention * visible_counts).mean(2))
        protection = protect_window(v, v.asked or query_count)
        return Scores(scores.masked_fill(protection > 0, 0.0), protection)


@dataclass(frozen=True)
class EveryChunk(TopK):
    """The best entries of every chunk of the text, in proportion to the chunk's size.

    Protected entries are kept first. The rest of a head's budget is divided among the chunks in proportion to their
    unprotected entries, by largest remainder (ties go to the earlier chunk), and each chunk keeps its best entries. No
    part of the text is left out.

    Attributes:
        chunk_length: Tokens per chunk; the first chunk begins at position 0. None: the whole text is one chunk, which
            is plain top-k.
    """

    name: ClassVar[str] = "every_chunk"
    chunk_length: int | None = 1024

    def __post_init__(self) -> None:
        if self.chunk_length is not None:
            check_count("chunk_length", self.chunk_length, 1, "tokens, or none")

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Choose exactly `share` valid entries per head, bool `[B, H, n]`."""
        if self.chunk_length is None:
            return super().select(v, scores, share)
        rank_keys = order_key(v, scores)
        protected_mask = v.valid & (scores.protect > 0)
        kept_mask = best(rank_keys.masked_fill(~protected_mask, -1), torch.minimum(share, protected_mask.sum(-1)))
        free_mask = v.valid & ~protected_mask
        chunk_count = int(v.length.max()) // self.chunk_length + 1
        # Protected and missing entries go to an extra chunk after the last one.
        chunk_indices = (v.position // self.chunk_length).masked_fill(~free_mask, chunk_count)
        chunk_sizes = sum_into(free_mask.float(), chunk_indices, chunk_count + 1).long()
        remaining = share - kept_mask.sum(-1)
        capacities = chunk_sizes[..., :chunk_count].flatten(0, 1)
        chunk_quotas = apportion(capacities.double(), remaining.flatten(), capacities).view(
            *remaining.shape, chunk_count
        )
        # Rank of every entry within its chunk: sort by chunk, then by rank key.
        by_rank_key = rank_keys.argsort(dim=-1, descending=True)
        chunk_order = by_rank_key.gather(-1, chunk_indices.gather(-1, by_rank_key).argsort(dim=-1, stable=True))
        order_ranks = torch.empty_like(chunk_order)
        order_ranks.scatter_(
            -1,
            chunk_order,
            torch.arange(chunk_order.shape[-1], device=rank_keys.device).expand_as(chunk_order),
        )
        chunk_ranks = order_ranks - (chunk_sizes.cumsum(-1) - chunk_sizes).gather(-1, chunk_indices)
        allowed_counts = torch.nn.functional.pad(chunk_quotas, (0, 1)).gather(-1, chunk_indices)
        return kept_mask | (free_mask & (chunk_ranks < allowed_counts))


FINCH = Policy(
    name="finch",
    score=QuestionAttention(),
    allocate=Uniform(),
    select=EveryChunk(chunk_length=None),
    summary="keeps the question and what its tokens attend to, in every chunk of the context",
    paper="arXiv 2408.00167, section 3, as in kvpress",
    moments=("question",),
    cost="time O(H_q w T d), memory O(H_q w T) for a question of w tokens",
)
