"""SirLLM: the tokens that surprised the model, with attention sinks; older turns fade.

Yao, Li, Zhao: SirLLM: Streaming Infinite Retentive LLM, arXiv 2405.12528: token entropy with
decay. 4 sinks; decay 1, 0.9 or 0.7 by task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Need, Policy, Score, Scores, Surprisal, View, protect_sinks


@dataclass(frozen=True)
class TokenSurprisal(Score):
    """`s_i = -log p(x_i | x_<i) * decay ** turns_ago`, the same in all heads and layers.

    The first token of a sequence takes the largest surprisal of all. Where the budget leaves no
    room beside the sinks the last token stays before them.

    Attributes:
        sinks: First tokens of the sequence that are protected.
        decay: What a turn of the dialogue leaves of an older turn's scores.
    """

    name: ClassVar[str] = "surprisal"
    nonnegative: ClassVar[bool] = True
    sinks: int = 4
    decay: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.sinks < 0:
            raise UserError(f"sinks={self.sinks}: a number of tokens, 0 or more, would be right")
        if not 0 <= self.decay <= 1:
            raise UserError(f"decay={self.decay}: a factor in [0, 1] would be right")

    @property
    def needs(self) -> frozenset[Need]:
        """Every token's surprisal."""
        return frozenset({Surprisal()})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        value = v.obs[Surprisal()].float() * self.decay ** v.turns_ago.float()
        newest = (v.age == 0) & v.valid & (v.budget <= self.sinks)[:, None, None]
        protect = torch.where(newest, Scores.NEWEST, protect_sinks(v, self.sinks))
        return Scores(value, protect.to(torch.int8))


SIRLLM = Policy(
    name="sirllm",
    score=TokenSurprisal(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps 4 sinks and the most surprising tokens, the same everywhere; older turns fade",
    paper="arXiv 2405.12528, token entropy and its decay",
    moments=("turns",),
    cost="time O(T vocabulary d_model) once, memory O(T)",
)
