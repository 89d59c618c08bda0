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


def spare_entries(policy: Policy, moment: Moment) -> int:
    """Entries beyond the budget, per (layer, head) on average, at which a sequence is cut."""
    return max(1, policy.buffer) if moment == "decode" else 1


def tail_of(policy: Policy, budget: Budget, token_count: int) -> int:
    """Tokens of a prompt that a chunked prefill takes in after its last cut; see `Score.tail`.

    A prompt that fits in the budget is never cut and has no tail. Otherwise the tail leaves at
    least one entry per (layer, head) to the tokens before it.
    """
    head_budget = budget.per_head(token_count)
    if policy.score is None or token_count <= head_budget:
        return 0
    return min(policy.score.tail, head_budget - 1)


def first_budget(
    policy: Policy,
    budget: Budget,
    moment: Moment,
    token_count: int,
    prompt_length: int | None = None,
    reserved_tokens: int = 0,
    visual_tokens: int = 0,
) -> int:
    """Mean entries per (layer, head) that the first compression leaves of a sequence.

    Args:
        policy: The policy.
        budget: Its budget.
        moment: When the cache is compressed.
        token_count: Tokens that the sequence has seen.
        prompt_length: Tokens of the whole prompt, if those seen are only its first chunk.
        reserved_tokens: Tokens that come after the last cut, if this is the last cut.
        visual_tokens: How many of the tokens are of images and videos.
    """
    if not policy.evicts or moment == "turns":
        return token_count
    head_budget = budget.per_head(prompt_length or token_count, visual_tokens) - reserved_tokens
    return min(head_budget, token_count) if token_count >= head_budget + spare_entries(policy, moment) else token_count


@dataclass
class EvictionState:
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
        forked = copy.copy(self)
        forked.budget, forked.peak = [*self.budget], [*self.peak]
        forked.live, forked.room = [*self.live], [*self.room]
        return forked

    @classmethod
    def stack(cls, states: Sequence[EvictionState]) -> EvictionState:
        """Join the sequences of several; they have one policy and one moment."""
        stacked = copy.copy(states[0])
        stacked.budget = [head_budget for state in states for head_budget in state.budget]
        stacked.peak = [sequence_peak for state in states for sequence_peak in state.peak]
        stacked.live = [sequence_peak for state in states for sequence_peak in state.live]
        stacked.room = []
        stacked.seeds = torch.cat([state.seeds for state in states])
        stacked.seconds = 0.0
        return stacked
