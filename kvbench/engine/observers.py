"""Observers of the last queries, the attention received by entries, and the surprisal of tokens.

An observer holds one state per layer. It replaces a state and never writes into it, so forks can share all states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench import native
from kvbench.plugin import AnswerAttention, Replay
from kvbench.view import AttentionMass, ModelInfo, Need, Observer, PerToken, Queries
from kvbench.view.softmax import attention_weights, capped

_BLOCK = 1 << 22
"""Maximum number of float32 attention weights held at once per sequence while columns are summed."""

_CPU_BLOCK = 1 << 18
"""The same limit on a CPU, where a block should fit into a core's cache."""

_WAITING = 16
"""Maximum number of single queries that wait to be moved to the last ones of their layer."""


def observer_for(need: Need, info: ModelInfo) -> Observer:
    """Return the observer for a need; a plugin's need brings its own."""
    if isinstance(need, Queries):
        return QueryObserver(need.window)
    if isinstance(need, AttentionMass):
        return MassObserver(need.observe, need.power)
    if isinstance(need, Replay | AnswerAttention):
        return ReplayObserver()
    if isinstance(need, PerToken):
        return TokenObserver(need, info)
    return need.observer(info)


def is_built_in(need: Need) -> bool:
    """Return whether kvbench itself observes a need, not plugin code."""
    return isinstance(need, Queries | AttentionMass | Replay | AnswerAttention) or need.of_tokens


def measured(need: PerToken, layer: int, *observed: Tensor, model: ModelInfo) -> Tensor:
    """Measure new tokens on copies, because other cells use the same tensors.

    Args:
        layer: Index among the full-attention layers.
        observed: Hidden states, keys and values; see `PerToken.measure`.
    """
    hidden, key, value = (tensor.clone() for tensor in observed)
    return need.measure(layer, hidden, key, value, model)


class _Last(NamedTuple):
    """Queries of a layer, newest last.

    Attributes:
        query: `[B, H_q, w, d]`.
        seen: Mask of existing queries, bool `[B, w]`.
        is_settled: Whether these are the last queries, zero-padded at the front; otherwise those of one forward.
        window_sums: Attention that entries receive from them, float32 `[B, H_q, S]`, if their forward has summed it.
    """

    query: Tensor
    seen: Tensor
    is_settled: bool = True
    window_sums: Tensor | None = None


class LayerObserver:
    """Base of observers; forks share the layer states in `_held`."""

    _held: dict[int, Any]

    def fork(self) -> Self:
        """Return an independent copy."""
        forked = copy.copy(self)
        forked._held = dict(self._held)
        return forked


class QueryObserver(LayerObserver):
    """Keeps the last `window` queries of every layer.

    Args:
        window: Number of queries to keep per sequence; padding never counts.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._held: dict[int, tuple[_Last, ...]] = {}

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
        """Observe one forward of one layer; see `kvbench.plugin.Observer`."""
        new_tokens = q.shape[2]
        is_query = valid[:, valid.shape[1] - new_tokens :].clone()
        earlier = self._held.get(layer, ())
        if earlier and earlier[0].window_sums is not None:  # of a window that has moved
            earlier = (earlier[0]._replace(window_sums=None),)
        self._held[layer] = (*earlier, _Last(q.detach(), is_query, False))
        # Decoding adds one query at a time: they are moved to the end when they are read, not at every step.
        if new_tokens > 1 or len(self._held[layer]) > _WAITING:
            self.last(layer)

    @torch.no_grad()
    def last(self, layer: int) -> _Last:
        """Return the last `window` queries, zero-padded at the front if a sequence has fewer, and their mask."""
        parts = self._held[layer]
        if len(parts) == 1 and parts[0].is_settled:
            return parts[0]
        query = torch.cat([part.query for part in parts], 2) if len(parts) > 1 else parts[0].query
        seen = torch.cat([part.seen for part in parts], 1) if len(parts) > 1 else parts[0].seen
        if seen.device.type == "cpu" and seen.shape[1] >= self.window and bool(seen[:, -self.window :].all()):
            last_query = query[:, :, -self.window :].clone(memory_format=torch.contiguous_format)
            self._held[layer] = (_Last(last_query, seen[:, -self.window :]),)
            return self._held[layer][0]
        missing = max(0, self.window - seen.shape[1])
        query, seen = pad(query, (0, 0, missing, 0)), pad(seen, (missing, 0))
        # Padding may lie between queries. A stable sort by existence moves the existing ones to the end and keeps
        # their order.
        query_order = seen.long().argsort(dim=-1, stable=True)[:, -self.window :]
        seen = seen.gather(1, query_order)
        query = query.gather(2, query_order[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        self._held[layer] = (_Last(query.masked_fill(~seen[:, None, :, None], 0.0), seen),)
        return self._held[layer][0]

    def receive(self, layer: int, window_sums: Tensor) -> None:
        """Keep what entries receive from the last `native.WINDOW` queries, `[B, H_q, S]`, until more tokens come.

        Nothing is kept if the window has another length.
        """
        if self.window == native.WINDOW:
            self._held[layer] = (self.last(layer)._replace(window_sums=window_sums),)

    def read(self, layer: int) -> Tensor:
        """Return the last queries, `[B, H_q, window, d]`, newest last; missing ones are zero."""
        return self.last(layer).query

    def sequence(self, row: int, tokens: int) -> Self:
        """Return the observer of one sequence; see `kvbench.plugin.Separable`."""
        separated, sequence_slice = copy.copy(self), slice(row, row + 1)
        separated._held = {
            layer_index: (
                _Last(self.last(layer_index).query[sequence_slice], self.last(layer_index).seen[sequence_slice]),
            )
            for layer_index in self._held
        }
        return separated

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join the sequences of several observers in one batch."""
        stacked = cls(parts[0].window)
        for layer in parts[0]._held:
            states = [part.last(layer) for part in parts]
            query, seen = torch.cat([state.query for state in states]), torch.cat([state.seen for state in states])
            stacked._held[layer] = (_Last(query, seen),)
        return stacked


class _BesideEntries(LayerObserver):
    """Base of per-entry observers, whose values the cache keeps and stacks once packed.

    The state of a layer is a tensor `[B, ..., S]`.
    """

    def sequence(self, row: int, tokens: int) -> Self:
        """Return the observer of one sequence; see `kvbench.plugin.Separable`."""
        separated = copy.copy(self)
        layer_states = {
            layer_index: layer_state[row : row + 1, ..., -tokens:] for layer_index, layer_state in self._held.items()
        }
        separated._held = {layer_index: layer_state.contiguous() for layer_index, layer_state in layer_states.items()}
        return separated

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Raise NotImplementedError: the cache stacks per-entry state itself."""
        raise NotImplementedError("the cache stacks what it stores with its entries")


class MassObserver(_BesideEntries):
    """Sums the attention that every entry receives from each query head.

    Args:
        observe: Count exactly the last N queries, regardless of chunking; None counts all.
        power: Power of the attention weights, 1 or 2.
    """

    def __init__(self, observe: int | None, power: int = 1) -> None:
        self.observe, self.power = observe, power
        self._queries = None if observe is None else QueryObserver(observe)
        self._held: dict[int, Tensor] = {}

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
        """Observe one forward of one layer; see `kvbench.plugin.Observer`."""
        key_positions = (valid.long().cumsum(-1) - 1).masked_fill(~valid, -1)
        if self._queries is not None:
            # The window has moved, and the share of the queries that left it is not known separately. Recompute the
            # sum: `observe` rows, which costs less than the chunk's own attention.
            self._queries.update(layer, q, k, v, hidden, valid, scale)
            last_queries = self._queries.last(layer)
            distances = torch.arange(last_queries.seen.shape[1] - 1, -1, -1, device=q.device)
            query_positions = (valid.sum(-1)[:, None] - 1 - distances).masked_fill(~last_queries.seen, -1)
            self._held[layer] = column_sums(last_queries.query, k, query_positions, key_positions, scale, self.power)
            return
        query_positions = key_positions[:, key_positions.shape[1] - q.shape[2] :]
        self.receive(layer, column_sums(q, k, query_positions, key_positions, scale, self.power))

    def receive(self, layer: int, attention_sums: Tensor) -> None:
        """Add the attention of one forward, `[B, H_q, S]`, to that of earlier ones; for observers of all queries."""
        earlier_sums = self._held.get(layer)
        if earlier_sums is not None:
            attention_sums[..., : earlier_sums.shape[-1]] += earlier_sums
        self._held[layer] = attention_sums

    def fork(self) -> Self:
        """Return an independent copy."""
        forked = super().fork()
        if self._queries is not None:
            forked._queries = self._queries.fork()
        return forked

    def sequence(self, row: int, tokens: int) -> Self:
        """Return the observer of one sequence; see `kvbench.plugin.Separable`."""
        separated = super().sequence(row, tokens)
        if self._queries is not None:
            separated._queries = self._queries.sequence(row, tokens)
        return separated

    def read(self, layer: int) -> Tensor:
        """Return the attention received by every column, float32 `[B, H_q, S]`."""
        return self._held[layer]


def sums_all(observer: Observer) -> TypeGuard[MassObserver]:
    """Return whether an observer sums the attention of all queries, which the attention itself may have done."""
    return isinstance(observer, MassObserver) and observer.observe is None


class TokenObserver(_BesideEntries):
    """Stores a `PerToken` need's value for every token, per layer."""

    def __init__(self, need: PerToken, model: ModelInfo) -> None:
        self.need, self.model = need, model
        self._held: dict[int, Tensor] = {}

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
        """Observe one forward of one layer; see `kvbench.plugin.Observer`."""
        new_tokens = hidden.shape[1]
        new_inputs = hidden, k[:, :, -new_tokens:], v[:, :, -new_tokens:]
        new_values = measured(self.need, layer, *new_inputs, model=self.model)
        old_values = self._held.get(layer)
        self._held[layer] = new_values if old_values is None else torch.cat([old_values, new_values], -1)

    def read(self, layer: int) -> Tensor:
        """Return the values of all tokens, float32 `[B, H, S]`."""
        return self._held[layer]


class ReplayObserver(_BesideEntries):
    """Holds the observations of `kvbench.engine.replay` until more tokens arrive."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    @property
    def stale(self) -> bool:
        """Return whether the context must be replayed before an eviction step."""
        return not self._held

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
        """Discard an earlier replay, which covers a shorter context."""
        self._held = {}

    def record(self, layer_states: dict[int, Tensor]) -> None:
        """Store the result of a replay, by layer, float32 `[B, H, S]`."""
        self._held = layer_states

    def read(self, layer: int) -> Tensor:
        """Return the replayed value of every entry, float32 `[B, H, S]`."""
        return self._held[layer]


class SurprisalObserver:
    """Computes `-log p` of every token under the model, from its final hidden states."""

    def __init__(self) -> None:
        self._surprisal: Tensor | None = None
        self._last: Tensor | None = None

    @torch.no_grad()
    def update(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        output_head: Callable[[Tensor], Tensor],
        valid: Tensor,
    ) -> None:
        """Observe one forward.

        Args:
            token_ids: New tokens, int64 `[B, n]`.
            hidden: Final hidden states of the new tokens, `[B, n, d_model]`.
            output_head: Maps hidden states to logits.
            valid: Mask of columns so far that are tokens, bool `[B, S]`.
        """
        batch, new_tokens = token_ids.shape
        is_token = valid[:, valid.shape[1] - new_tokens :]
        # A token is predicted by the hidden state of the token before it, and padding may lie between the two. Index 0
        # is the last token of all earlier forwards.
        earlier_state = hidden.new_zeros(batch, 1, hidden.shape[-1]) if self._last is None else self._last
        all_states = torch.cat([earlier_state, hidden], 1)
        state_index = torch.where(is_token, torch.arange(1, new_tokens + 1, device=token_ids.device), 0)
        latest_index = state_index.cummax(-1).values
        previous_index = torch.cat([torch.zeros_like(latest_index[:, :1]), latest_index[:, :-1]], 1)
        gather_index = previous_index[..., None].expand(-1, -1, hidden.shape[-1])
        source_states = all_states.gather(1, gather_index)
        surprisal = torch.empty(batch, new_tokens, device=token_ids.device)
        vocabulary_size = output_head(source_states[:, :1]).shape[-1]
        block_size = max(1, _BLOCK // (batch * vocabulary_size))
        for block_start in range(0, new_tokens, block_size):
            logits = output_head(source_states[:, block_start : block_start + block_size]).float()
            target = token_ids[:, block_start : block_start + block_size, None].to(logits.device)
            neg_log_probs = logits.logsumexp(-1) - logits.gather(-1, target)[..., 0]
            surprisal[:, block_start : block_start + block_size] = neg_log_probs.to(surprisal.device)
        if self._last is None:  # a sequence's first token has no prediction
            surprisal = surprisal.masked_fill(previous_index == 0, float("nan"))
        else:
            # A sequence with only padding so far starts here.
            has_started = valid[:, : valid.shape[1] - new_tokens].any(-1, keepdim=True)
            surprisal = surprisal.masked_fill((previous_index == 0) & ~has_started, float("nan"))
        end_index = latest_index[:, -1:, None].expand(-1, -1, hidden.shape[-1])
        self._last = all_states.gather(1, end_index)
        earlier = self._surprisal
        self._surprisal = surprisal if earlier is None else torch.cat([earlier, surprisal], 1)

    def read(self, valid: Tensor) -> Tensor:
        """Return each column's surprisal, float32 `[B, S]`; a first token gets the maximum."""
        assert self._surprisal is not None
        is_known = valid.to(self._surprisal.device) & ~self._surprisal.isnan()
        largest = self._surprisal.masked_fill(~is_known, 0.0).amax(-1, keepdim=True)
        return torch.where(is_known, self._surprisal, largest)

    def fork(self) -> Self:
        """Return an independent copy."""
        return copy.copy(self)

    def sequence(self, row: int, tokens: int) -> Self:
        """Return the observer of one sequence; see `kvbench.plugin.Separable`."""
        assert self._surprisal is not None and self._last is not None
        separated, sequence_slice = copy.copy(self), slice(row, row + 1)
        separated._surprisal, separated._last = self._surprisal[sequence_slice, -tokens:], self._last[sequence_slice]
        return separated

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join sequences in one batch; shorter ones are padded on the left."""
        stacked = cls()
        surprisals = [observer._surprisal for observer in parts if observer._surprisal is not None]
        column_count = max(surprisal.shape[1] for surprisal in surprisals)
        pad_tensor = torch.nn.functional.pad
        stacked._surprisal = torch.cat(
            [pad_tensor(surprisal, (column_count - surprisal.shape[1], 0)) for surprisal in surprisals]
        )
        stacked._last = torch.cat([observer._last for observer in parts if observer._last is not None])
        return stacked


def column_sums(
    query: Tensor,
    key: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
    power: int = 1,
) -> Tensor:
    """Sum causal softmax attention over queries, in blocks of queries.

    The sums are exact, because the softmax of a query covers all its keys at once. A block holds at most
    `B * H_q * block * S` float32 weights. Cost: `H_q n S d` flops per sequence if `n = S`.

    Args:
        query: Queries `[B, H_q, n, d]` in token order, the newest last.
        key: Keys `[B, H, S, d]`.
        query_positions: Logical position of every query, int64 `[B, n]`; -1 if it does not exist.
        key_positions: Logical position of every key, int64 `[B, S]`; -1 if it does not exist.
        scale: Scaling factor of the logits.
        power: Power of the weights before they are summed, 1 or 2.

    Returns:
        float32 `[B, H_q, S]`.
    """
    batch_size, query_heads, query_count = query.shape[:3]
    kv_heads, column_count = key.shape[1:3]
    transposed = key.float().transpose(-1, -2)
    column_totals = torch.zeros(batch_size, kv_heads, query_heads // kv_heads, column_count, device=query.device)
    on_cpu = query.device.type == "cpu"
    block_size = max(1, (_CPU_BLOCK if on_cpu else _BLOCK) // (query_heads * column_count))
    # Without padding only the newest columns need a mask. On a GPU this check would force a synchronisation.
    is_unpadded = on_cpu and bool((key_positions >= 0).all()) and bool((query_positions >= 0).all())
    for block_start in range(0, query_count, block_size):
        block_stop = min(block_start + block_size, query_count)
        visible_end = max(column_count - (query_count - block_stop), 1)  # later columns belong to later tokens
        masked_start = visible_end - (block_stop - block_start) if is_unpadded else 0
        scaled_query = query[:, :, block_start:block_stop].float() * scale
        row_positions = query_positions[:, None, block_start:block_stop, None]
        column_positions = key_positions[:, None, None, masked_start:visible_end]
        is_hidden = ((column_positions > row_positions) | (column_positions < 0))[:, :, None]
        logits = scaled_query.unflatten(1, (kv_heads, -1)).flatten(2, 3) @ transposed[..., :visible_end]
        logits = capped(logits, scale).view(batch_size, kv_heads, -1, block_stop - block_start, visible_end)
        logits[..., masked_start:].masked_fill_(is_hidden, float("-inf"))
        weights = attention_weights(logits, scale)
        if not is_unpadded:  # a missing query sees no key, so its softmax is NaN
            weights = weights.masked_fill_((row_positions < 0)[:, :, None], 0.0)
        column_totals[..., :visible_end] += weights.sum(3) if power == 1 else weights.square_().sum(3)
    return column_totals.flatten(1, 2)
