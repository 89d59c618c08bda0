"""What a cache remembers after its first compression, and the arithmetic of its budgets.

At the moments `decode`, `chunked` and `turns` a cache is cut more than once. This module holds the
state between the cuts; `kvbench.engine.evict` acts on it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from kvbench.budget import Budget
from kvbench.moments import LATER, Moment
from kvbench.plugin import Policy
from kvbench.view import ModelInfo


def goes_on(policy: Policy, moment: Moment) -> bool:
    """Whether a cache of this policy can be cut again after its first compression."""
    return moment in LATER and policy.evicts


def spare(policy: Policy, moment: Moment) -> int:
    """Entries beyond the budget, per (layer, head) on average, at which a sequence is cut."""
    return max(1, policy.buffer) if moment == "decode" else 1


def tail_of(policy: Policy, budget: Budget, tokens: int) -> int:
    """Tokens of a prompt that a chunked prefill takes in after its last cut; see `Score.tail`.

    A prompt that fits in the budget is never cut and has no tail. Otherwise the tail leaves at
    least one entry per (layer, head) to the tokens before it.
    """
    allowed = budget.per_head(tokens)
    if policy.score is None or tokens <= allowed:
        return 0
    return min(policy.score.tail, allowed - 1)


def first_budget(
    policy: Policy,
    budget: Budget,
    moment: Moment,
    tokens: int,
    whole: int | None = None,
    coming: int = 0,
    visual_tokens: int = 0,
) -> int:
    """Mean entries per (layer, head) that the first compression leaves of a sequence.

    Args:
        policy: The policy.
        budget: Its budget.
        moment: When the cache is compressed.
        tokens: Tokens that the sequence has seen.
        whole: Tokens of the whole prompt, if those seen are only its first chunk.
        coming: Tokens that come after the last cut, if this is the last cut.
        visual_tokens: How many of the tokens are of images and videos.
    """
    if not policy.evicts or moment == "turns":
        return tokens
    allowed = budget.per_head(whole or tokens, visual_tokens) - coming
    return min(allowed, tokens) if tokens >= allowed + spare(policy, moment) else tokens


@dataclass
class Upkeep:
    """The state of a cache between its cuts; all its sequences have one policy.

    Attributes:
        policy: The policy.
        info: The model.
        moment: `decode`: a sequence that holds `budget + buffer` entries per (layer, head) is cut
            back when a forward ends; `chunked`: every sequence beyond its budget is cut back after
            each chunk; `turns`: sequences are cut back when `evict.restore` is called.
        budget: Mean entries per (layer, head) that a cut leaves, for every sequence.
        seeds: Noise seeds of the sequences, int64 `[B]`.
        final: Whether the next chunk is the last one before the last cut of the prefill.
        coming: Tokens that come after that cut.
        peak: Most entries that each sequence has held at once, over all layers and heads.
        live: Most bytes that the entries of each sequence have taken at once.
        room: Most bytes that were allocated for each sequence at once, since it began to grow.
        seconds: Time that the cuts took.
    """

    policy: Policy
    info: ModelInfo
    moment: Moment
    budget: list[int]
    seeds: Tensor
    final: bool = True
    coming: int = 0
    peak: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def heads(self) -> int:
        """KV heads of all full-attention layers together."""
        return self.info.layers * self.info.kv_heads

    def fork(self) -> Self:
        """Return a copy that can continue on its own."""
        other = copy.copy(self)
        other.budget, other.peak = [*self.budget], [*self.peak]
        other.live, other.room = [*self.live], [*self.room]
        return other

    @classmethod
    def stack(cls, parts: Sequence[Upkeep]) -> Upkeep:
        """Join the sequences of several; they have one policy and one moment."""
        out = copy.copy(parts[0])
        out.budget = [b for p in parts for b in p.budget]
        out.peak = [n for p in parts for n in p.peak]
        out.live = [n for p in parts for n in p.live]
        out.room = []
        out.seeds = torch.cat([p.seeds for p in parts])
        out.seconds = 0.0
        return out
