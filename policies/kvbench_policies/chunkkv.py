"""ChunkKV: whole chunks of neighbouring tokens are kept or evicted.

Liu, Tang, Dong, Li, Liu, B. Li, Hu, Chu: ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context
LLM Inference, arXiv 2502.00299, Algorithm 1. The paper's chunks have 10 tokens, those of kvpress 20. The paper's
layer-wise index reuse, which saves time, is not implemented: every layer selects its own chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Range, Scores, View
from kvbench_policies.merging import sum_into
from kvbench_policies.ranges import check_count
from kvbench_policies.snapkv import WindowAttention


@dataclass(frozen=True)
class Chunks(TopK):
    """The best chunks of `chunk_length` neighbouring tokens, by their mean score.

        s_i = mean of the scores of the unprotected entries j with floor(j / c) = floor(i / c)

    with positions `i`, `j` and chunk length `c`; protected entries stay protected. Top-k then takes whole chunks,
    because ties go to the more recent token; if the budget covers only part of the last chunk, its newest tokens are
    kept. Allocators see the chunks' scores, too. Unlike the paper's sum, the mean does not penalise a shorter last
    chunk or one that an earlier eviction step has thinned out.

    Attributes:
        chunk_length: Tokens per chunk, the paper's `c`; the first chunk begins at position 0.
        joint: Whether the mean is over all KV heads of the layer, so that heads with equal budgets keep the same chunks
            (as in kvpress). If false, each head scores its own chunks.
    """

    name: ClassVar[str] = "chunk"
    searched: ClassVar[Mapping[str, Range]] = {"chunk_length": Range(2, 32, log=True)}
    chunk_length: int = 10
    joint: bool = True

    def __post_init__(self) -> None:
        check_count("chunk_length", self.chunk_length, 1)

    def prepare(self, v: View, scores: Scores) -> Scores:
        """Replace the scores of unprotected entries with those of their chunks."""
        free_mask = v.valid & (scores.protect <= 0)
        chunk_labels = (v.position // self.chunk_length).masked_fill(~free_mask, -1)
        free_scores = scores.value.float().masked_fill(~free_mask, 0.0)
        if self.joint:
            chunk_labels, free_scores = (
                chunk_labels.flatten(1)[:, None],
                free_scores.flatten(1)[:, None],
            )
        chunk_means = mean_of_equals(free_scores, chunk_labels).view(v.shape)
        return Scores(torch.where(free_mask, chunk_means, scores.value), scores.protect)


def mean_of_equals(values: Tensor, labels: Tensor) -> Tensor:
    """Replace every value with the mean of the values that have the same label in its row.

    Args:
        values: float32 `[B, R, m]`.
        labels: int64 `[B, R, m]`.
    """
    ordered, sort_order = labels.sort(dim=-1, stable=True)
    run_starts = torch.nn.functional.pad(ordered.diff(dim=-1) != 0, (1, 0))
    run_indices = torch.empty_like(sort_order).scatter_(-1, sort_order, run_starts.long().cumsum(-1))
    entry_count = labels.shape[-1]
    label_sums = sum_into(values.contiguous(), run_indices, entry_count)
    label_counts = sum_into(torch.ones_like(values), run_indices, entry_count)
    return (label_sums / label_counts.clamp(min=1)).gather(-1, run_indices)


CHUNKKV = Policy(
    name="chunkkv",
    score=WindowAttention(kernel=1),
    allocate=Uniform(),
    select=Chunks(),
    summary="keeps the last 32 tokens and the chunks of 10 tokens that their queries attend to",
    paper="arXiv 2502.00299, Algorithm 1",
    cost="time O(H_q w T d), memory O(H_q w T + H T d)",
)
