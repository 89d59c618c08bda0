"""Entries held at every step of a policy's cache along a text.

An evicted entry never returns, so one number describes each entry: the first step after which it is not held. (Bui and
others, arXiv 2512.03324, equation 1: `alpha_ti >= alpha_(t+1)i`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.analysis.common import kept_masks
from kvbench.benchmark import Medium
from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import forward
from kvbench.engine.eviction_state import spare_entries
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import BudgetError
from kvbench.plugin import Policy
from kvbench.runs.worker import ModelRunner


@dataclass(frozen=True)
class Trace:
    """Entries of one text that one policy held over time.

    Attributes:
        eviction_steps: Step after which an entry is no longer held, int32 `[L, H, T]`; `T` if held to the end. Step `t`
            ends when token `t` has passed the model and eviction is done.
        budget: Mean entries per layer and KV head after an eviction step.
        eviction_count: Number of eviction steps.
    """

    eviction_steps: Tensor
    budget: int
    eviction_count: int

    @property
    def entries(self) -> Tensor:
        """Return the entries of every KV head at the end of every step, int64 `[L, H, T]`."""
        return entries(self.eviction_steps)

    @property
    def held(self) -> Tensor:
        """Return the mask of entries held at the end, bool `[L, H, T]`."""
        return self.eviction_steps == self.eviction_steps.shape[-1]


def entries(eviction_steps: Tensor, counted_mask: Tensor | None = None) -> Tensor:
    """Count the entries held at the end of every step.

    Args:
        eviction_steps: As in `Trace`, `[..., T]`.
        counted_mask: Positions to count, bool `[T]`; None: all.

    Returns:
        Counts, int64 `[..., T]`.
    """
    length = eviction_steps.shape[-1]
    if counted_mask is None:
        counted_mask = torch.ones(length, dtype=torch.bool, device=eviction_steps.device)
    count_shape = (*eviction_steps.shape[:-1], length + 1)
    evicted_counts = torch.zeros(count_shape, dtype=torch.int64, device=eviction_steps.device)
    evicted_counts.scatter_add_(-1, eviction_steps.long(), counted_mask.long().expand_as(eviction_steps))
    return counted_mask.cumsum(-1) - evicted_counts[..., :length].cumsum(-1)


def held_at_steps(eviction_steps: Tensor, steps: Tensor) -> Tensor:
    """Return rows of eviction maps, `alpha_ti`.

    Args:
        eviction_steps: As in `Trace`, `[..., T]`.
        steps: Steps `t`, int64 `[R]`.

    Returns:
        Whether entry `i` is held at the end of step `t`, bool `[..., R, T]`.
    """
    positions = torch.arange(eviction_steps.shape[-1], device=eviction_steps.device)
    return (positions <= steps[:, None]) & (steps[:, None] < eviction_steps[..., None, :])


def trace_decoding(
    runner: ModelRunner,
    token_ids: Sequence[int],
    policy: Policy,
    budget: Budget,
    seed: int,
    advance: Callable[[int], None] = lambda tokens: None,
    media: Sequence[Medium] = (),
    initial: int = 1,
) -> Trace:
    """Feed a text token by token, as if the model generated it (moment `decode`).

    Args:
        runner: Runs the model.
        token_ids: The text.
        policy: The policy, which evicts when the budget and its buffer are full, as in any run.
        budget: The budget; a fraction refers to this text's tokens.
        seed: Noise seed.
        advance: Called with the number of tokens fed.
        media: Images and videos of the text.
        initial: Tokens fed at once at the beginning, because an image cannot be fed token by token.
    """
    prefix, _ = runner.prefill(token_ids[:initial], policy.needs, media)
    entry_limit = budget.per_head(len(token_ids), prefix.cache.visual_tokens()[0])
    compression = Compression(policy, Budget(tokens=entry_limit), "decode", seed)
    cache = prefix.compress([compression])[0]
    watch = Watch(cache, len(token_ids))
    advance(initial)
    for token in token_ids[initial:]:
        forward(runner.model, cache, runner.tensor([token]))
        watch.step()
        advance(1)
    return watch.trace(entry_limit)


def trace_compression(prefix: Prefix, policy: Policy, budget: Budget, seed: int, context: int, length: int) -> Trace:
    """Compress a context once (moment `context`); all later tokens are kept.

    Args:
        prefix: The context, prefilled.
        policy: The policy that compresses it.
        budget: The budget; a fraction refers to the context's tokens.
        seed: Noise seed.
        context: Tokens of the context.
        length: Tokens of the whole text.
    """
    cache = prefix.compress([Compression(policy, budget, "context", seed)], 1)[0]
    watch = Watch(cache, length)
    return watch.trace(budget.per_head(context, cache.visual_tokens()[0]), length)


def evicts_nothing(policy: Policy, entry_limit: int, length: int) -> bool:
    """Return whether a text is too short for any eviction."""
    return length < entry_limit + spare_entries(policy, "decode")


class Watch:
    """Observer of a single-sequence cache after every step.

    Args:
        cache: The cache, just compressed.
        max_tokens: Maximum tokens that it will see.

    Attributes:
        eviction_count: Number of eviction steps.
    """

    def __init__(self, cache: RaggedCache, max_tokens: int) -> None:
        ragged_layers = cache.ragged
        record_shape = (len(ragged_layers), ragged_layers[0].heads, max_tokens)
        assert cache.valid is not None
        device = cache.valid.device
        self.cache, self.eviction_count = cache, 0
        self.heads = record_shape[0] * record_shape[1]
        self._eviction_steps = torch.full(record_shape, max_tokens, dtype=torch.int32, device=device)
        self._live_entries = 0
        self._seen_tokens = 0
        self.step()

    def step(self) -> None:
        """Record the evictions of the newest step."""
        seen_tokens, live_entries = self.cache.get_seq_length(), self.cache.live_entries()
        # If every head grew by the new tokens, nothing was evicted and the kept sets need no comparison.
        if live_entries == self._live_entries + self.heads * (seen_tokens - self._seen_tokens):
            self._live_entries, self._seen_tokens = live_entries, seen_tokens
            return
        max_tokens = self._eviction_steps.shape[-1]
        kept_mask = torch.stack(kept_masks(self.cache))
        known_steps = self._eviction_steps[..., :seen_tokens]
        if bool((kept_mask & (known_steps < max_tokens)).any()):
            raise BudgetError("an entry that was evicted is held again")
        known_steps[~kept_mask & (known_steps == max_tokens)] = seen_tokens - 1
        self.eviction_count += 1
        self._live_entries, self._seen_tokens = live_entries, seen_tokens

    def trace(self, budget: int, length: int | None = None) -> Trace:
        """Return the trace of the tokens so far.

        Args:
            budget: As in `Trace`.
            length: Number of tokens to include; unseen ones count as kept. None: those seen by the cache.
        """
        traced_tokens = self._seen_tokens if length is None else length
        return Trace(
            self._eviction_steps[..., :traced_tokens].clamp(max=traced_tokens).cpu(),
            budget,
            self.eviction_count,
        )
