"""Value-aware token pruning: attention times the length of the value.

Guo, Kamigaito, Watanabe: Attention Score is not All You Need for Token Importance Indicator in KV
Cache Reduction: Value Also Matters, arXiv 2406.12335, section 3; here on the attention of a window,
and without the paper's sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Need, Policy, Queries, Score, Scores, View, protect_window


@dataclass(frozen=True)
class AttentionTimesValue(Score):
    """`s_i = mean_q A[q, i] * ||v_i||_1`; the last `window` tokens are protected."""

    name: ClassVar[str] = "example_vatp"
    nonnegative: ClassVar[bool] = True
    window: int = 16

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"window={self.window}: use 1 or more tokens")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Queries(self.window)})

    def score(self, v: View) -> Scores:
        attention = v.grouped(v.window_attention_sum(self.window) / self.window)
        norm = torch.linalg.vector_norm(v.value.float(), ord=1, dim=-1)
        return Scores(attention * norm, protect_window(v, self.window))


EXAMPLE_VATP = Policy(
    name="example_vatp",
    score=AttentionTimesValue(),
    allocate=Uniform(),
    select=TopK(),
    summary="window attention times the L1 norm of the value",
    paper="arXiv 2406.12335, section 3",
)
