"""Oracle: keeps what question and answer attend to. It sees both, so it is a reference for methods, not one of them.

The full cache reads question and answer, and an entry is worth the attention that it receives from them. KVzip's replay
(arXiv 2505.23416) puts the context itself in the place of question and answer. The oracle is greedy, so it is no upper
bound: another choice of entries can be better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.parts import TopK
from kvbench.plugin import AnswerAttention, Need, Policy, Score, Scores, View, protect_nothing
from kvbench_policies.adakv import HeadAdaptive


@dataclass(frozen=True)
class ReceivedFromAnswer(Score):
    """Attention that an entry receives from question and answer.

        s_i = sum_q mean_{g in group} A_g[q, i]

    with the queries `q` of all tokens that are fed after the eviction, and a causal softmax over the whole cache.
    Nothing is pooled or protected.

    Attributes:
        target: `full`: the full cache's own greedy answer; `reference`: the reference answer, with several joined by
            commas.
    """

    name: ClassVar[str] = "answer_attention"
    nonnegative: ClassVar[bool] = True
    target: Literal["full", "reference"] = "full"

    @property
    def needs(self) -> frozenset[Need]:
        """Attention from question and answer."""
        return frozenset({self._need})

    @property
    def _need(self) -> AnswerAttention:
        return AnswerAttention(self.target)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        return Scores(v.obs[self._need], protect_nothing(v))


ORACLE = Policy(
    name="oracle",
    score=ReceivedFromAnswer(),
    allocate=HeadAdaptive(),
    select=TopK(),
    summary="informed reference: keeps what question and answer attend to; heads share a layer's budget",
    paper="none: an informed reference",
    cost="a forward of question and answer, and the full cache's answer; time O(H_q n T d) for n tokens, memory O(H T)",
)
