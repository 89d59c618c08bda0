"""Decode-time eviction state of a cache, and the arithmetic of its budgets.

At the moments `decode`, `chunked` and `turns` a cache is evicted from more than once. This module holds the state
between those eviction steps; `kvbench.engine.evict` acts on it.
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
    """Return whether a cache of this policy can be evicted from again after its first compression."""
    return moment in LATER and policy.evicts


def spare_entries(policy: Policy, moment: Moment) -> int:
    """Return the entries above budget, per (layer, head) on average, that trigger an eviction step."""
    return max(1, policy.buffer) if moment == "decode" else 1


def tail_of(policy: Policy, budget: Budget, token_count: int) -> int:
    """Return the prompt tokens that a chunked prefill adds after its last eviction step; see `Score.tail`.

    There are none if the prompt fits in the budget. Otherwise the tokens before them keep at least one entry per
    (layer, head).
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
    """Return the mean entries per (layer, head) that a sequence keeps after its first compression.

    Args:
        moment: When the cache is compressed.
        token_count: Tokens that the sequence has seen.
        prompt_length: Tokens of the whole prompt, if only its first chunk has been seen.
        reserved_tokens: Tokens that follow the last eviction step, if this is it.
        visual_tokens: Number of image and video tokens among them.
    """
    if not policy.evicts or moment == "turns":
        return token_count
    head_budget = budget.per_head(prompt_length or token_count, visual_tokens) - reserved_tokens
    return min(head_budget, token_count) if token_count >= head_budget + spare_entries(policy, moment) else token_count


@dataclass
class EvictionState:
    """Eviction state of a cache between its eviction steps; all its sequences have one policy.

    Attributes:
        moment: `decode`: evict at the end of a forward from a sequence that holds `budget + buffer` entries per
            (layer, head); `chunked`: evict after each chunk from every sequence over budget; `turns`: evict when
            `evict.restore` is called.
        budget: Mean entries per (layer, head) after an eviction step, per sequence.
        seeds: Noise seeds of the sequences, int64 `[B]`.
        final: Whether the next chunk is the last one before the prefill's last eviction step.
        coming: Tokens that follow that step.
        peak: Peak number of entries of each sequence, over all layers and heads.
        live: Peak bytes of live entries of each sequence.
        room: Peak bytes allocated for each sequence since it began to grow.
        seconds: Total time of the eviction steps.
    """

    policy: Policy
    info: ModelInfo
    moment: Moment
    budget: list[int]
    seeds: Tensor
    final: bool = True
    coming: int = 0
    peak: list[int] = field(init=False)
    live: list[int] = field(init=False)
    room: list[int] = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.peak, self.live, self.room = ([0] * len(self.budget) for _ in range(3))

    @property
    def heads(self) -> int:
        """Return the number of KV heads in all full-attention layers."""
        return self.info.layers * self.info.kv_heads

    def fork(self) -> Self:
        """Return an independent copy."""
        forked = copy.copy(self)
        forked.budget, forked.peak = [*self.budget], [*self.peak]
        forked.live, forked.room = [*self.live], [*self.room]
        return forked

    @classmethod
    def stack(cls, states: Sequence[EvictionState]) -> EvictionState:
        """Join the states of several sequences with the same policy and moment."""
        stacked = copy.copy(states[0])
        stacked.budget = [mean_entries for state in states for mean_entries in state.budget]
        stacked.peak = [entry_count for state in states for entry_count in state.peak]
        stacked.live = [byte_count for state in states for byte_count in state.live]
        stacked.room = [0] * len(stacked.budget)
        stacked.seeds = torch.cat([state.seeds for state in states])
        stacked.seconds = 0.0
        return stacked
