"""Chunks after the first of a chunked prefill, on a cell's own cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import forward
from kvbench.engine.evict import restore


def feed_chunks(
    model: nn.Module,
    token_ids: Tensor,
    cache: RaggedCache,
    chunk_size: int,
    trailing_tokens: int,
    *,
    all_logits: bool = False,
) -> Iterator[Tensor]:
    """Feed the chunks after the first and the tail, each to a cache that was cut back to budget.

    Args:
        model: The model, inside `engine`.
        token_ids: All tokens of the prompts, `[B, T]`; the cache has the first chunk.
        cache: The cell's cache.
        chunk_size: Tokens per chunk.
        trailing_tokens: Tokens after the last eviction step.
        all_logits: Whether to yield the logits after every token.

    Yields:
        The logits after each chunk, `[B, vocabulary]`, or after all of its tokens, `[B, n, vocabulary]`.
    """
    eviction_state, body_length = cache.eviction_state, token_ids.shape[1] - trailing_tokens
    budgets = [] if eviction_state is None else eviction_state.budget
    for chunk_start in range(chunk_size, body_length, chunk_size):
        if eviction_state is not None:
            eviction_state.final = chunk_start + chunk_size >= body_length
            if eviction_state.final:  # the last cut leaves room for the tail
                eviction_state.coming = trailing_tokens
                eviction_state.budget = [budget - trailing_tokens for budget in budgets]
        chunk = token_ids[:, chunk_start : min(chunk_start + chunk_size, body_length)]
        logits = forward(model, cache, chunk, logit_count=chunk.shape[1] if all_logits else None)
        restore(cache, range(cache.batch))  # a chunk of one token is not cut when its forward ends
        yield logits
    if eviction_state is not None:
        eviction_state.budget, eviction_state.coming = budgets, 0
    if trailing_tokens:
        logit_count = trailing_tokens if all_logits else None
        yield forward(model, cache, token_ids[:, body_length:], logit_count=logit_count)


def end_chunks(cache: RaggedCache) -> float:
    """Record what a cache holds after its last chunk and detach its state; return the seconds of its eviction steps."""
    evict_seconds = 0.0
    cache.held_entries = [cache.live_entries(0)]
    if cache.eviction_state is not None:
        evict_seconds = cache.eviction_state.seconds
        cache.budget_entries = [cache.eviction_state.heads * cache.eviction_state.budget[0]]
    cache.detach_state()
    return evict_seconds
