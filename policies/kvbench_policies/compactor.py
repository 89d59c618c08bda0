"""Compactor: key leverage blended with attention without the causal mask.

Chari, Van Durme: Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv
2507.08143, with the defaults of kvpress (`CompactorPress`, by the first author): 8 sinks, 4 recent tokens, and the
compression ratio as the weight of the leverage (0.5 in compactor-vllm). The two terms are also available as
`score=leverage` and `score=non_causal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Need, Policy, Range, Score, Scores, View, protect_sinks, protect_window
from kvbench_policies.leverage import leverage, standardised
from kvbench_policies.non_causal import ChunkAttention, pooled_attention
from kvbench_policies.ranges import check_count, check_finite


@dataclass(frozen=True)
class Blend(Score):
    """`s_i = blend * z(leverage_i) + z(attention_i)` for the tokens between sinks and recent tokens.

    Leverage is that of `score=leverage` and attention that of `score=non_causal`, both over these tokens alone: chunks
    begin after the sinks. `z` standardises over the entries of the layer.

    Attributes:
        blend: Weight of the leverage; None uses the compression ratio, `1 - b/T`.
        sinks: Number of protected first tokens.
        recent: Number of protected last tokens.
        chunk: See `non_causal.NonCausalAttention`.
        sketch: See `leverage.Leverage`.
        variant: See `non_causal.NonCausalAttention`.
    """

    name: ClassVar[str] = "compactor"
    searched: ClassVar[Mapping[str, Range]] = {
        "sinks": Range(0, 16),
        "recent": Range(0, 64),
        "chunk": Range(32, 512, log=True),
    }
    blend: float | None = None
    sinks: int = 8
    recent: int = 4
    chunk: int = 256
    sketch: int = 48
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        if self.blend is not None:
            check_finite("blend", self.blend, 0)
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 0)
        check_count("chunk", self.chunk, 1)
        check_count("sketch", self.sketch, 0, "dimensions")

    @property
    def needs(self) -> frozenset[Need]:
        """Attention within chunks."""
        return frozenset({self._need})

    @property
    def _need(self) -> ChunkAttention:
        return ChunkAttention(self.chunk, self.sinks, self.recent, self.variant == "release")

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 where they are protected."""
        rated_mask = v.valid & (v.position >= self.sinks) & (v.age >= self.recent)
        outlier_scores = standardised(leverage(v, rated_mask, self.sketch), rated_mask)
        attention = standardised(pooled_attention(v, self._need), rated_mask)
        if self.blend is None:
            blend_weight = (1 - v.budget.double() / v.length).clamp(min=0.0).float()[:, None, None]
            scores = blend_weight * outlier_scores + attention
        else:
            scores = self.blend * outlier_scores + attention
        protection = torch.maximum(protect_window(v, self.recent), protect_sinks(v, self.sinks))
        return Scores(scores, protection)


COMPACTOR = Policy(
    name="compactor",
    score=Blend(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps outlier keys and the tokens that whole chunks attend to, without a causal mask",
    paper="arXiv 2507.08143",
    moments=("context", "question"),
    cost="time O(H T (d + sketch) sketch + H_q T chunk d), memory O(H T (d + sketch))",
)
