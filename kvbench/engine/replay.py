"""Replays: the model reads its own context a second time, or what follows it, and its attention is observed.

A replay runs on a copy of one sequence's prefilled cache, once per prefill for all policies that need it, between the
prefill and the first eviction step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import forward
from kvbench.engine.models import decoder_of
from kvbench.engine.observers import MassObserver, ReplayObserver
from kvbench.errors import UserError
from kvbench.plugin import AnswerAttention, Replay
from kvbench.view import ModelInfo
from kvbench.view.softmax import attention_weights, capped

UNTOLD = "the policy sees question and answer; use it with kvbench run, or give kvbench.kept the following tokens"
"""Message of a policy that sees what follows the cache, where that is unknown."""

LEAD = 8
"""Number of tokens replayed before a chunk to give the model its context."""

_BLOCK = 1 << 22
"""Maximum number of float32 attention weights held at once."""


class ReplayCache(RaggedCache):
    """A copy of one sequence's cache for a replay."""


@torch.no_grad()
def observe_replays(model: nn.Module, cache: RaggedCache, info: ModelInfo) -> bool:
    """Run the pending replays of a prefilled cache's observers; return whether there were any.

    Args:
        model: The model, inside `engine` or `kvbench.attach`.
        cache: A dense cache.

    Raises:
        UserError: The token ids of the context are unknown, it has images, or what follows it is unknown.
    """
    was_replayed = False
    for need, observer in cache.observers.items():
        if not isinstance(observer, ReplayObserver) or not observer.stale:
            continue
        if isinstance(need, Replay):
            observer.record(_replayed(model, cache, info, need))
            was_replayed = True
        elif isinstance(need, AnswerAttention):
            observer.record(_answered(model, cache, need))
            was_replayed = True
    return was_replayed


def _replayed(model: nn.Module, cache: RaggedCache, info: ModelInfo, need: Replay) -> dict[int, Tensor]:
    """Return the replayed value of every entry by layer, float32 `[B, H, S]`; 0 for padding."""
    assert cache.valid is not None
    if cache.ids is None:
        raise UserError("a replay needs token ids, but the forward was given embeddings")
    _check_text(cache)
    token_ids = torch.cat(cache.ids, 1)
    replay_values = {
        layer_index: torch.zeros(*layer.key.shape[:3], device=layer.key.device)
        for layer_index, layer in enumerate(cache.ragged)
        if layer.key is not None
    }
    for sequence_index, token_count in enumerate(cache.lengths().tolist()):
        sequence_cache = _sequence(model, cache, sequence_index, token_count)
        first_column = cache.valid.shape[1] - token_count
        for chunk_start, chunk_end in _chunks(token_count, need.chunk):
            chunk_observer = _ChunkObserver(need, info, chunk_start, chunk_end)
            chunk_cache = sequence_cache.fork()
            chunk_cache.observers[need] = chunk_observer
            replayed_ids = token_ids[
                sequence_index : sequence_index + 1,
                first_column + max(0, chunk_start - LEAD) : first_column + chunk_end,
            ]
            forward(model, chunk_cache, replayed_ids)
            for layer_index, layer_values in replay_values.items():
                layer_values[sequence_index, :, first_column + chunk_start : first_column + chunk_end] = (
                    chunk_observer.read(layer_index)[0]
                )
    return replay_values


def replayed_tokens(token_count: int, chunk_size: int) -> int:
    """Return the tokens of the forwards that replay a context of `token_count` tokens."""
    return sum(end - max(0, start - LEAD) for start, end in _chunks(token_count, chunk_size))


def _check_text(cache: RaggedCache) -> None:
    if cache.visual is not None and bool(cache.visual.any()):
        raise UserError("a replay supports text only, but the context has images")


def _answered(model: nn.Module, cache: RaggedCache, need: AnswerAttention) -> dict[int, Tensor]:
    """Return the attention that every entry receives from the tokens that follow, by layer, float32 `[B, H, S]`."""
    assert cache.valid is not None
    following_ids = cache.following.get(need.target)
    if following_ids is None:
        if cache.following:
            raise UserError("the sample has no reference answer; use target=full")
        raise UserError(UNTOLD)
    _check_text(cache)
    column_count = cache.valid.shape[1]
    received = {
        layer_index: torch.zeros(*layer.key.shape[:3], device=layer.key.device)
        for layer_index, layer in enumerate(cache.ragged)
        if layer.key is not None
    }
    if not following_ids.shape[1]:
        return received
    for sequence_index, token_count in enumerate(cache.lengths().tolist()):
        sequence_cache = _sequence(model, cache, sequence_index, token_count)
        mass_observer = MassObserver(None)
        sequence_cache.observers[need] = mass_observer
        forward(model, sequence_cache, following_ids[sequence_index : sequence_index + 1])
        for layer_index, layer_values in received.items():
            by_query_head = mass_observer.read(layer_index)[0, :, :token_count]
            by_kv_head = by_query_head.unflatten(0, (layer_values.shape[1], -1)).mean(1)
            layer_values[sequence_index, :, column_count - token_count :] = by_kv_head
    return received


def _chunks(token_count: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    for chunk_start in range(0, token_count, chunk_size):
        yield chunk_start, min(chunk_start + chunk_size, token_count)


def _sequence(model: nn.Module, cache: RaggedCache, sequence_index: int, token_count: int) -> ReplayCache:
    """Return one sequence of a dense cache without padding and observers."""
    sequence_cache = ReplayCache(decoder_of(model).config)
    assert cache.valid is not None
    sequence_cache.valid = cache.valid[sequence_index : sequence_index + 1, -token_count:]
    sequence_cache.shift = None if cache.shift is None else cache.shift[sequence_index : sequence_index + 1]
    sequence_cache.layers, sequence_cache.ids = cache.layers_of(sequence_index, token_count), None
    for layer in sequence_cache.ragged:
        layer.closed = False
    return sequence_cache


class _ChunkObserver(ReplayObserver):
    """Maximum attention that the entries of one chunk receive from its replay.

    The softmax covers the sinks, the chunk and the replayed tokens so far, as in the authors' code: its cost does not
    depend on the context length.

    Args:
        chunk_start, chunk_end: Bounds of the chunk.
    """

    def __init__(self, need: Replay, info: ModelInfo, chunk_start: int, chunk_end: int) -> None:
        super().__init__()
        self.need, self.info, self.start, self.end = need, info, chunk_start, chunk_end

    def update(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor,
        valid: Tensor,
        scale: float,
    ) -> None:
        """Observe one forward of one layer; see `kvbench.plugin.Observer`."""
        kv_heads, query_count = k.shape[1], q.shape[2]
        sink_count, chunk = min(self.need.sinks, self.start), slice(self.start, self.end)
        keys = torch.cat([k[:, :, :sink_count], k[:, :, chunk], k[:, :, -query_count:]], 2).float()
        column_count = keys.shape[2]
        key_columns = torch.arange(column_count, device=q.device) - (column_count - query_count)
        value_norms = self._value_norm(layer, v[:, :, chunk]) if self.need.norm else None
        largest = torch.zeros(1, kv_heads, self.end - self.start, device=q.device)
        block_size = max(1, _BLOCK // (q.shape[1] * column_count))
        for block_start in range(0, query_count, block_size):
            scaled_query = q[:, :, block_start : block_start + block_size].float() * scale
            block_rows = scaled_query.shape[2]
            logits = capped(scaled_query.unflatten(1, (kv_heads, -1)).flatten(2, 3) @ keys.transpose(-1, -2), scale)
            query_columns = torch.arange(block_start, block_start + block_rows, device=q.device)
            logits = logits.view(1, kv_heads, -1, block_rows, column_count)
            is_later = key_columns > query_columns[:, None]
            weights = attention_weights(logits.masked_fill_(is_later, float("-inf")), scale)
            received = weights[..., sink_count : sink_count + self.end - self.start]
            if value_norms is not None:
                hidden_norms = hidden[:, block_start : block_start + block_rows].float().norm(dim=-1)
                received = received * value_norms[:, :, :, None] / hidden_norms[:, None, None, :, None]
            largest = torch.maximum(largest, received.amax((2, 3)))
        self._held[layer] = largest

    def _value_norm(self, layer: int, value: Tensor) -> Tensor:
        """Return `||v W_O||` of every query head's slice of the output projection, `[1, H, G, n]`."""
        head_weights = self.info.output_weight(layer).float().unflatten(0, (value.shape[1], -1))
        norm_parts = [(value.float() @ head_weight).norm(dim=-1) for head_weight in head_weights.unbind(1)]
        return torch.stack(norm_parts, 2)
