"""KVzip: keeps what the model attends to while it reads the context a second time.

Kim, Kim, Kwon, Lee, Yun, Song: KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv
2505.23416, section 3, and the authors' code; chunks and sinks as in kvpress. The authors prompt the model to repeat the
context. Here the context is fed again without a prompt, so no tokenizer is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.parts import TopK
from kvbench.plugin import Need, Policy, Range, Replay, Score, Scores, View, protect_sinks
from kvbench_policies.joint import Global
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class Reconstruction(Score):
    """Maximum attention that an entry receives while its chunk of the context is fed again.

        s_i = max_{g in group} max_q A_g[q, i]

    with the queries `q` of the chunk that holds `i` and of the 8 tokens before it, fed after the whole context. The
    softmax is over the sinks, the chunk and the tokens fed so far. Tokens added after the first eviction step have no
    such score and are protected.

    Attributes:
        replay: Tokens per chunk.
        sinks: Number of protected first tokens.
        plus: Multiply attention by `||v_i W_O||_2` and divide it by the norm of the hidden state of `q` (KVzip+, as in
            kvpress).
        level: `pair`: every entry has its own score; `head`: all entries of a head get the head's maximum, so that
            whole heads are kept (the paper's context-independent eviction).
    """

    name: ClassVar[str] = "reconstruction"
    searched: ClassVar[Mapping[str, Range]] = {"sinks": Range(0, 16)}
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
        """Replay of the context."""
        return frozenset({self._need})

    @property
    def _need(self) -> Replay:
        return Replay(self.replay, self.sinks, self.plus)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        if self._need in v.obs:  # first eviction step
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
    summary="keeps what is attended to while the context is read a second time; one top-N over all heads",
    paper="arXiv 2505.23416, section 3",
    cost="a second prefill in chunks; time O(H_q T c d) for chunks of c tokens, memory O(T + c^2)",
)
