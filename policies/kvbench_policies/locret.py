"""LocRet: retaining heads predict the largest attention logit of each token during the answer.

Huang, Yuan, Han, Xiao, Liu: Locret: Enhancing Eviction in Long-Context LLM Inference with Trained Retaining Heads on
Consumer-Grade Devices, arXiv 2410.01805. The paper uses chunks of 3072 tokens and a budget of 6000.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Scores, View, protect_window
from kvbench_policies.gates.config import Kind
from kvbench_policies.gates.learned import Learned
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class PredictedLogit(Learned):
    """Predicted maximum logit of a token over the queries of the answer.

    It is predicted once from the token's own queries, keys and values before RoPE and stored with the entry. At moment
    `chunked`, the prompt's last `local` tokens are prefilled after the last eviction step, so they do not see evicted
    entries; every earlier step protects the last `stabilizers` entries of every head. At the other moments, the last
    `local` tokens are protected. In both cases they count towards the budget.

    Attributes:
        stabilizers: Number of newest entries protected between chunks.
        local: Number of newest tokens that are always kept.
    """

    name: ClassVar[str] = "locret"
    kind: ClassVar[Kind] = "locret"
    stabilizers: int = 2500
    local: int = 100

    def __post_init__(self) -> None:
        check_count("stabilizers", self.stabilizers, 0, "entries")
        check_count("local", self.local, 0)

    @property
    def tail(self) -> int:
        """Number of local tokens, which are prefilled after the last eviction step."""
        return self.local

    def reserved(self, length: int) -> int:
        """Return the number of local tokens."""
        return self.local

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        protection = protect_window(v, max(0, self.local - v.coming))
        if not v.final:
            # Number of newer entries
            newer_counts = v.valid.sum(-1, keepdim=True) - v.valid.cumsum(-1)
            protection = (v.valid & (newer_counts < self.stabilizers)).to(protection.dtype) * Scores.WINDOW
        return Scores(self.learned(v), protection)


LOCRET = Policy(
    name="locret",
    score=PredictedLogit(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the newest tokens and those that a learned head predicts the answer will attend to",
    paper="arXiv 2410.01805",
    moments=("chunked",),
    cost="time O(T (H_q + 2 H) d 1024) once for the head, memory O(H T)",
)
