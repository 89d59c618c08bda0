"""KVzip: keeps what the model attends to while it reads its own context once more.

Kim, Kim, Kwon, Lee, Yun, Song: KVzip: Query-Agnostic KV Cache Compression with Context
Reconstruction, arXiv 2505.23416, section 3, and the authors' code; chunks and sinks as in kvpress.
The authors ask the model in words to repeat the context. Here the context itself is fed again,
without such a prompt, so that no tokenizer is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.parts import TopK
from kvbench.plugin import Need, Policy, Replay, Score, Scores, View, protect_sinks
from kvbench_policies.joint import Global
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class Reconstruction(Score):
    """Largest attention that an entry receives while its chunk of the context is fed again.

        s_i = max_{g in group} max_q A_g[q, i]

    with the queries `q` of the chunk that holds `i` and of the 8 tokens before it, fed behind the
    whole context. The softmax is over the sinks, the chunk and the tokens fed so far. Tokens that
    come after the first cut have not been fed again; at later cuts they are protected.

    Attributes:
        replay: Tokens of a chunk.
        sinks: Number of protected first tokens.
        plus: Whether attention is multiplied by `||v_i W_O||_2` and divided by the length of the
            hidden state of `q` (KVzip+, as in kvpress).
        level: `pair`: every entry has a score of its own; `head`: all entries of a head have the
            largest, so that whole heads stay (the paper's context-independent eviction).
    """

    name: ClassVar[str] = "reconstruction"
    nonnegative: ClassVar[bool] = True
    extras: ClassVar[Mapping[str, torch.dtype]] = {
        "attention": torch.float32,
        "replayed": torch.bool,
    }
    replay: int = 2048
    sinks: int = 4
    plus: bool = False
    level: Literal["pair", "head"] = "pair"

    def __post_init__(self) -> None:
        check_count("replay", self.replay, 1)
        check_count("sinks", self.sinks, 0)

    @property
    def needs(self) -> frozenset[Need]:
        """The replay of the context."""
        return frozenset({self._need})

    @property
    def _need(self) -> Replay:
        return Replay(self.replay, self.sinks, self.plus)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        if self._need in v.obs:  # the first cut
            v.extras["attention"], v.extras["replayed"] = v.obs[self._need], v.valid
        attention, replayed = v.extras["attention"], v.extras["replayed"]
        if self.level == "head":
            largest = attention.masked_fill(~v.valid, 0.0).amax(-1, keepdim=True)
            attention = largest.expand(v.shape)
        newer_class = (v.valid & ~replayed).to(torch.int8) * Scores.WINDOW
        return Scores(attention, torch.maximum(newer_class, protect_sinks(v, self.sinks)))


KVZIP = Policy(
    name="kvzip",
    score=Reconstruction(),
    allocate=Global(),
    select=TopK(),
    summary="keeps what is attended to while the context is read once more; one top-N over all",
    paper="arXiv 2505.23416, section 3",
    cost="a second prefill in chunks; time O(H_q T c d) for chunks of c tokens, memory O(T + c^2)",
)
