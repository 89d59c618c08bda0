"""SirLLM: keeps attention sinks and the tokens that surprised the model most; older turns decay.

Yao, Li, Zhao: SirLLM: Streaming Infinite Retentive LLM, arXiv 2405.12528: token entropy with decay. The paper uses 4
sinks and, depending on the task, a decay of 1, 0.9 or 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Need, Policy, Range, Score, Scores, Surprisal, View, protect_sinks
from kvbench_policies.ranges import check_count, check_share


@dataclass(frozen=True)
class TokenSurprisal(Score):
    """`s_i = -log p(x_i | x_<i) * decay ** turns_ago`, the same in all heads and layers.

    The first token of a sequence gets the largest surprisal of the sequence. If the budget is not larger than the
    number of sinks, the newest token is protected before them.

    Attributes:
        sinks: Number of protected first tokens.
        decay: Factor applied to a token's score for each later turn of the dialogue.
        variant: `paper`: the sinks and the most surprising other tokens; `release` (the authors' code): the sinks and
            the `b - sinks` most surprising tokens, which may include sinks; the newest tokens fill the gaps left by
            this overlap.
    """

    name: ClassVar[str] = "surprisal"
    searched: ClassVar[Mapping[str, Range]] = {"sinks": Range(0, 16)}
    nonnegative: ClassVar[bool] = True
    sinks: int = 4
    decay: float = 1.0
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_share("decay", self.decay)

    @property
    def version(self) -> int:
        """2 with two or more sinks: the last sink is now dropped first if the sinks do not fit."""
        return 2 if self.sinks > 1 else 1

    @property
    def needs(self) -> frozenset[Need]:
        """Surprisal per token."""
        return frozenset({Surprisal()})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        scores = v.obs[Surprisal()].float() * self.decay ** v.turns_ago.float()
        newest_mask = (v.age == 0) & v.valid & (v.budget <= self.sinks)[:, None, None]
        protection = protect_sinks(v, self.sinks)
        if self.variant == "release":
            # Ties go to the older token: the first token shares the largest surprisal.
            score_order = scores.masked_fill(~v.valid, -1.0).argsort(dim=-1, descending=True, stable=True)
            chosen_mask = v.valid & (score_order.argsort(-1) < (v.budget - self.sinks)[:, None, None])
            protection = torch.where(chosen_mask & (protection <= 0), Scores.CHOSEN, protection)
            scores = torch.where(chosen_mask, scores, v.position.float())
        protection = torch.where(newest_mask, Scores.NEWEST, protection)
        return Scores(scores, protection.to(torch.int8))


SIRLLM = Policy(
    name="sirllm",
    score=TokenSurprisal(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps 4 sinks and the most surprising tokens, the same in all heads; older turns decay",
    paper="arXiv 2405.12528, token entropy and its decay",
    moments=("turns",),
    cost="time O(T vocabulary d_model) once, memory O(T)",
)
