"""KVzap: a small network predicts KVzip+ scores from the hidden state.

Jégou, Jeblick: KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv 2601.07891, section 3. The paper keeps the
entries above one threshold for all layers and heads, so the number kept depends on the text. Here the budget is fixed
and the best entries of the whole cache are kept, which equals a threshold that passes the same number of entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.parts import TopK
from kvbench.plugin import Policy, Scores, View, protect_window
from kvbench_policies.gates.config import Kind
from kvbench_policies.gates.learned import Learned
from kvbench_policies.joint import Global
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class PredictedReconstruction(Learned):
    """Predicted log of the KVzip+ score, `log max_q A[q, i] ||v_i W_O||_2 / ||h_q||_2`.

    The maximum is over the queries of a replay of the text and the query heads of a KV head (see `kvzip:plus=true`). A
    linear layer or an MLP with one hidden layer per decoder layer predicts it once, from the input of the attention
    block, and it is stored with the entry. The policy itself needs no replay. A hidden state does not encode a token's
    age, so the newest tokens are protected.

    Attributes:
        window: Number of newest tokens that are always kept. The paper's 128 use up most of a budget of one or two
            hundred entries per head.
    """

    name: ClassVar[str] = "predicted_reconstruction"
    kind: ClassVar[Kind] = "kvzap"
    window: int = 128

    def __post_init__(self) -> None:
        check_count("window", self.window, 0)

    def reserved(self, length: int) -> int:
        """The window."""
        return self.window

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        return Scores(self.learned(v), protect_window(v, self.window))


KVZAP = Policy(
    name="kvzap",
    score=PredictedReconstruction(),
    allocate=Global(),
    select=TopK(),
    summary="a small network predicts KVzip's scores; one top-N over all heads",
    paper="arXiv 2601.07891, section 3",
    moments=("context", "question", "decode"),
    cost="time O(T d_model 512) once for the network and O(H T) per eviction step, memory O(L H T)",
)
