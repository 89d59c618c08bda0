"""Attention without the causal mask within chunks, one of Compactor's two terms.

Chari, Van Durme: Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores, arXiv
2507.08143. Logits are not scaled, as in both implementations by the authors (compactor-vllm, and `NonCausalAttnPress`
in kvpress).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from kvbench.plugin import ModelInfo, Need, Observer, Range, Score, View
from kvbench_policies.leverage import standardised
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class ChunkAttention(Need):
    """Attention that every token receives within its chunk, times the norm of its value.

    float32 `[B, H, S]` by position, for all tokens of the text, evicted or not; 0 for skipped tokens. An open chunk
    continues after an eviction step.

    Attributes:
        chunk: Tokens per chunk.
        first: Number of first tokens to skip.
        last: Number of last tokens to skip.
        padded: Pad the last chunk with zero queries and keys.
    """

    chunk: int
    first: int
    last: int
    padded: bool

    def observer(self, model: ModelInfo) -> Observer:
        """Return a new observer."""
        return _Chunks(self)


class _OpenChunk(NamedTuple):
    """State of one layer.

    Attributes:
        closed: Attention received in complete chunks, by position, `[B, H, S]`.
        chunks: Number of complete chunks, int64 `[B]`.
        query: Queries after the complete chunks, `[B, H_q, w, d]`, oldest first.
        key: Their keys, `[B, H, w, d]`.
        size: Norms of their values, float32 `[B, H, w]`.
        live: Those that exist, bool `[B, w]`; they come first.
    """

    closed: Tensor
    chunks: Tensor
    query: Tensor
    key: Tensor
    size: Tensor
    live: Tensor


class _Chunks:
    """Sums of the attention in complete chunks, with the queries and keys of the open chunk.

    Args:
        need: Chunk size and skipped tokens.
    """

    def __init__(self, need: ChunkAttention) -> None:
        self.need = need
        self._held: dict[int, _OpenChunk] = {}

    @torch.no_grad()
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
        """Observe one forward pass of one layer; see `kvbench.plugin.Observer`."""
        token_count, chunk_size = q.shape[2], self.need.chunk
        positions = (valid.long().cumsum(-1) - 1)[:, -token_count:]
        live_mask = valid[:, -token_count:] & (positions >= self.need.first)
        keys, value_norms = k[:, :, -token_count:], v[:, :, -token_count:].float().norm(dim=-1)
        closed_sums = q.new_zeros(len(q), k.shape[1], 0, dtype=torch.float32)
        chunk_counts = positions.new_zeros(len(q))
        if layer in self._held:
            previous = self._held[layer]
            closed_sums, chunk_counts = previous.closed, previous.chunks
            q, keys = torch.cat([previous.query, q], 2), torch.cat([previous.key, keys], 2)
            value_norms, live_mask = (
                torch.cat([previous.size, value_norms], 2),
                torch.cat([previous.live, live_mask], 1),
            )
        live_order = (~live_mask).to(torch.int8).argsort(dim=-1, stable=True)
        live_counts = live_mask.sum(-1)
        complete_counts = (live_counts - self.need.last).clamp(min=0) // chunk_size
        max_complete = max(0, live_mask.shape[1] - self.need.last) // chunk_size
        closed_sums = pad(closed_sums, (0, valid.shape[1] - closed_sums.shape[-1]))
        full_counts = torch.full_like(live_counts, chunk_size)
        for chunk_index in range(max_complete):
            columns = live_order[:, chunk_index * chunk_size : (chunk_index + 1) * chunk_size]
            attention = received(
                _gather_columns(q, columns), _gather_columns(keys, columns), full_counts
            ) * _gather_columns(value_norms, columns)
            start_positions = self.need.first + (chunk_counts + chunk_index) * chunk_size
            closed_sums = _write_span(
                closed_sums,
                attention,
                start_positions,
                full_counts.masked_fill(chunk_index >= complete_counts, 0),
            )
        # The rest fits in one chunk plus the last tokens.
        open_width = min(live_mask.shape[1], chunk_size + self.need.last)
        ordinals = (complete_counts * chunk_size)[:, None] + torch.arange(open_width, device=q.device)
        columns = live_order.gather(1, ordinals.clamp(max=live_mask.shape[1] - 1))
        open_mask = ordinals < live_counts[:, None]
        self._held[layer] = _OpenChunk(
            closed_sums,
            chunk_counts + complete_counts,
            _gather_columns(q, columns),
            _gather_columns(keys, columns),
            _gather_columns(value_norms, columns),
            open_mask,
        )

    def read(self, layer: int) -> Tensor:
        """Return the attention received by every token, by position, float32 `[B, H, S]`."""
        open_state, chunk_size = self._held[layer], self.need.chunk
        key_counts = (open_state.live.sum(-1) - self.need.last).clamp(min=0)
        padding = max(0, chunk_size - open_state.live.shape[1]) if self.need.padded else 0
        queries, keys = (
            pad(tensor, (0, 0, 0, padding))[:, :, :chunk_size] for tensor in (open_state.query, open_state.key)
        )
        attention = received(queries, keys, key_counts, padded=self.need.padded)
        attention = attention * pad(open_state.size, (0, padding))[..., :chunk_size]
        return _write_span(
            open_state.closed,
            attention,
            self.need.first + open_state.chunks * chunk_size,
            key_counts,
        )

    def fork(self) -> Self:
        """Return an independent copy."""
        duplicate = type(self)(self.need)
        duplicate._held = dict(self._held)
        return duplicate

    def sequence(self, row: int, tokens: int) -> Self:
        """Return the observer of one sequence; see `kvbench.plugin.Separable`."""
        duplicate = self.fork()
        for layer, open_state in self._held.items():
            sequence_state = _OpenChunk(*(tensor[row : row + 1] for tensor in open_state))
            # `closed` is indexed by position.
            duplicate._held[layer] = sequence_state._replace(closed=sequence_state.closed[..., :tokens])
        return duplicate

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join the sequences of several observers into one batch."""
        joined = cls(parts[0].need)
        for layer in parts[0]._held:
            layer_states = [observer._held[layer] for observer in parts]
            closed_length = max(state.closed.shape[-1] for state in layer_states)
            open_length = max(state.live.shape[-1] for state in layer_states)
            paddings = [open_length - state.live.shape[-1] for state in layer_states]
            padded_states = list(zip(layer_states, paddings, strict=True))
            joined._held[layer] = _OpenChunk(
                torch.cat([pad(state.closed, (0, closed_length - state.closed.shape[-1])) for state in layer_states]),
                torch.cat([state.chunks for state in layer_states]),
                torch.cat([pad(state.query, (0, 0, 0, padding)) for state, padding in padded_states]),
                torch.cat([pad(state.key, (0, 0, 0, padding)) for state, padding in padded_states]),
                torch.cat([pad(state.size, (0, padding)) for state, padding in padded_states]),
                torch.cat([pad(state.live, (0, padding)) for state, padding in padded_states]),
            )
        return joined


def _gather_columns(tensor: Tensor, columns: Tensor) -> Tensor:
    """Gather columns (int64 `[B, m]`) of `tensor`, `[B, K, n]` or `[B, K, n, d]`."""
    indices = columns[:, None].expand(-1, tensor.shape[1], -1)
    if tensor.dim() == 4:
        indices = indices[..., None].expand(-1, -1, -1, tensor.shape[-1])
    return tensor.gather(2, indices)


def _write_span(target: Tensor, values: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
    """Return a copy of `target` `[B, H, S]` with the first `counts` of `values` `[B, H, c]` written at `starts`."""
    offsets = torch.arange(values.shape[-1], device=values.device)
    dump_column = target.shape[-1]
    positions = torch.where(offsets < counts[:, None], starts[:, None] + offsets, dump_column)
    indices = positions[:, None].expand(-1, target.shape[1], -1)
    return pad(target, (0, 1)).scatter(-1, indices, values)[..., :dump_column]


def received(queries: Tensor, keys: Tensor, key_counts: Tensor, padded: bool = False) -> Tensor:
    """Return the attention that a chunk's keys receive from all of its queries, without a causal mask.

    Args:
        queries: `[B, H_q, c, d]`.
        keys: `[B, H, c, d]`.
        key_counts: Number of tokens in the chunk, int64 `[B]`; they come first.
        padded: Include the missing tokens as zero queries and keys.

    Returns:
        Sum over queries, mean over the query heads of a KV head, float32 `[B, H, c]`.
    """
    head_count, chunk_size = keys.shape[1:3]
    real_mask = torch.arange(chunk_size, device=keys.device) < key_counts[:, None]
    queries, keys = (tensor.float().masked_fill(~real_mask[:, None, :, None], 0.0) for tensor in (queries, keys))
    logits = queries.unflatten(1, (head_count, -1)).flatten(2, 3) @ keys.transpose(-1, -2)
    logits = logits.unflatten(2, (-1, chunk_size))
    if not padded:
        logits = logits.masked_fill(~real_mask[:, None, None, None], float("-inf"))
    attention = logits.softmax(-1)
    if not padded:
        attention = attention.masked_fill(~real_mask[:, None, None, :, None], 0.0)
    return attention.sum(3).mean(2)


def pooled_attention(view: View, need: ChunkAttention) -> Tensor:
    """Average each token with its two neighbours in the text, float32 `[B, H, n]`, zero-padded."""
    pooled = avg_pool1d(view.obs[need], 3, stride=1, padding=1)
    return pooled.gather(-1, view.position.clamp(0, pooled.shape[-1] - 1))


@dataclass(frozen=True)
class NonCausalAttention(Score):
    """Attention that an entry receives from its chunk, times the norm of its value.

        a_i = || v_i || mean_{g in group} sum_{q in chunk} softmax_{j in chunk}( q_g . k_j )_i

    averaged over each token and its two neighbours, and standardised over the entries of the layer. Queries of a chunk
    also attend to its later tokens, and logits are not scaled; soft caps and attention sinks, which belong to the
    model's scaled and causal attention, are left out.

    Attributes:
        chunk: Tokens per chunk; the last one can be shorter.
        variant: `paper`, or `release` (kvpress): the last chunk is padded with zero queries and keys.
    """

    name: ClassVar[str] = "non_causal"
    searched: ClassVar[Mapping[str, Range]] = {"chunk": Range(32, 512, log=True)}
    chunk: int = 256
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        check_count("chunk", self.chunk, 1)

    @property
    def needs(self) -> frozenset[Need]:
        """Attention within chunks."""
        return frozenset({self._need})

    @property
    def _need(self) -> ChunkAttention:
        return ChunkAttention(self.chunk, 0, 0, self.variant == "release")

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        return standardised(pooled_attention(v, self._need), v.valid)
