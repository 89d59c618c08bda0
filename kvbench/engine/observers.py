"""Observers: the last queries, the attention that entries receive, the surprisal of tokens.

An observer holds one state per layer. It replaces a state and never writes into it, so that a fork
can share all states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.plugin import Replay
from kvbench.view import AttentionMass, ModelInfo, Need, Observer, PerToken, Queries

_BLOCK = 1 << 22
"""Most float32 attention weights that are held at once per sequence while columns are summed."""

_CPU_BLOCK = 1 << 18
"""The same on a CPU, where a block should fit into the cache of a core."""


def observer_for(need: Need, info: ModelInfo) -> Observer:
    """Make the observer for a need; a need of a plugin brings its own."""
    if isinstance(need, Queries):
        return QueryObserver(need.window)
    if isinstance(need, AttentionMass):
        return MassObserver(need.observe, need.power)
    if isinstance(need, Replay):
        return ReplayObserver()
    if isinstance(need, PerToken):
        return TokenObserver(need, info)
    return need.observer(info)


def is_built_in(need: Need) -> bool:
    """Whether kvbench itself observes a need, and no code of a plugin."""
    return isinstance(need, Queries | AttentionMass | Replay) or need.of_tokens


def measured(need: PerToken, layer: int, *shown: Tensor, model: ModelInfo) -> Tensor:
    """Let a need measure new tokens on copies: other cells see the same tensors.

    Args:
        need: What is measured.
        layer: Index among the full-attention layers.
        shown: Hidden states, keys and values; see `PerToken.measure`.
        model: The model.
    """
    hidden, key, value = (x.clone() for x in shown)
    return need.measure(layer, hidden, key, value, model)


class _Last(NamedTuple):
    """The last queries of a layer.

    Attributes:
        query: `[B, H_q, w, d]`, with zeros in front if a sequence has fewer.
        seen: Which of them exist, bool `[B, w]`.
    """

    query: Tensor
    seen: Tensor


class LayerObserver:
    """Base of observers: forks share the states `_held` of the layers."""

    _held: dict[int, Any]

    def fork(self) -> Self:
        """Return an observer that can continue without changing this one."""
        other = copy.copy(self)
        other._held = dict(self._held)
        return other


class QueryObserver(LayerObserver):
    """Keeps the last `window` queries of every layer.

    Args:
        window: How many queries of each sequence to keep; padding never counts.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._held: dict[int, _Last] = {}

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
        batch, heads, n, dim = q.shape
        last = self._held.get(layer)
        if last is None:
            empty = q.new_zeros(batch, heads, self.window, dim)
            last = _Last(empty, valid.new_zeros(batch, self.window))
        # There may be padding between old and new queries. A stable sort by existence moves the
        # queries that exist to the end and keeps their order.
        seen = torch.cat([last.seen, valid[:, valid.shape[1] - n :]], 1)
        order = seen.long().argsort(dim=-1, stable=True)[:, -self.window :]
        seen = seen.gather(1, order)
        index = order[:, None, :, None].expand(-1, heads, -1, dim)
        old = last.query.gather(2, index.clamp(max=self.window - 1))
        new = q.gather(2, (index - self.window).clamp(min=0))
        query = torch.where(index < self.window, old, new)
        self._held[layer] = _Last(query.masked_fill(~seen[:, None, :, None], 0.0), seen)

    def read(self, layer: int) -> Tensor:
        """Return the last queries, `[B, H_q, window, d]`, newest last; missing ones are zero."""
        return self._held[layer].query

    def sequence(self, row: int, tokens: int) -> Self:
        """The observer of one sequence; see `kvbench.plugin.Separable`."""
        other, here = copy.copy(self), slice(row, row + 1)
        other._held = {i: _Last(x.query[here], x.seen[here]) for i, x in self._held.items()}
        return other

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join the sequences of several observers in one batch."""
        out = cls(parts[0].window)
        for layer in parts[0]._held:
            held = [p._held[layer] for p in parts]
            out._held[layer] = _Last(
                torch.cat([x.query for x in held]), torch.cat([x.seen for x in held])
            )
        return out


class _BesideEntries(LayerObserver):
    """Base of per-entry observers: the cache itself keeps and stacks their values once packed.

    The state of a layer is a tensor `[B, ..., S]`.
    """

    def sequence(self, row: int, tokens: int) -> Self:
        """The observer of one sequence; see `kvbench.plugin.Separable`."""
        other = copy.copy(self)
        held = {i: x[row : row + 1, ..., -tokens:] for i, x in self._held.items()}
        other._held = {i: x.contiguous() for i, x in held.items()}
        return other

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Refuse: there is nothing to join."""
        raise NotImplementedError("the cache stacks what it stores with its entries")


class MassObserver(_BesideEntries):
    """Sums the attention that every entry receives from each query head.

    Args:
        observe: Count exactly this many last queries, regardless of the chunks they came in;
            None: all.
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
        position = (valid.long().cumsum(-1) - 1).masked_fill(~valid, -1)
        if self._queries is not None:
            # The window has moved, and the contribution of the queries that left it is not known
            # separately. So the sum over the window is recomputed: `observe` rows, which is less
            # than the chunk's own attention costs.
            self._queries.update(layer, q, k, v, hidden, valid, scale)
            last = self._queries._held[layer]
            behind = torch.arange(last.seen.shape[1] - 1, -1, -1, device=q.device)
            at = (valid.sum(-1)[:, None] - 1 - behind).masked_fill(~last.seen, -1)
            self._held[layer] = column_sums(last.query, k, at, position, scale, self.power)
            return
        at = position[:, position.shape[1] - q.shape[2] :]
        mass = column_sums(q, k, at, position, scale, self.power)
        before = self._held.get(layer)
        if before is not None:
            mass[..., : before.shape[-1]] += before
        self._held[layer] = mass

    def fork(self) -> Self:
        """Return an observer that can continue without changing this one."""
        other = super().fork()
        if self._queries is not None:
            other._queries = self._queries.fork()
        return other

    def sequence(self, row: int, tokens: int) -> Self:
        """The observer of one sequence; see `kvbench.plugin.Separable`."""
        other = super().sequence(row, tokens)
        if self._queries is not None:
            other._queries = self._queries.sequence(row, tokens)
        return other

    def read(self, layer: int) -> Tensor:
        """Return the attention that every column received, float32 `[B, H_q, S]`."""
        return self._held[layer]


class TokenObserver(_BesideEntries):
    """Keeps the number that a `PerToken` need gives every token, layer by layer.

    Args:
        need: Measures the tokens.
        model: The model.
    """

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
        n = hidden.shape[1]
        own = hidden, k[:, :, -n:], v[:, :, -n:]
        new = measured(self.need, layer, *own, model=self.model)
        old = self._held.get(layer)
        self._held[layer] = new if old is None else torch.cat([old, new], -1)

    def read(self, layer: int) -> Tensor:
        """Return the numbers of all tokens, float32 `[B, H, S]`."""
        return self._held[layer]


class ReplayObserver(_BesideEntries):
    """Holds what `kvbench.engine.replay` has observed, until more tokens come."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    @property
    def stale(self) -> bool:
        """Whether the context has to be replayed before a cut."""
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
        """Forget an earlier replay: it was of a shorter context."""
        self._held = {}

    def record(self, held: dict[int, Tensor]) -> None:
        """Keep the result of a replay, by layer, float32 `[B, H, S]`."""
        self._held = held

    def read(self, layer: int) -> Tensor:
        """Return what every entry received, float32 `[B, H, S]`."""
        return self._held[layer]


class SurprisalObserver:
    """`-log p` of every token under the model, from the hidden states of its last layer."""

    def __init__(self) -> None:
        self._surprisal: Tensor | None = None
        self._last: Tensor | None = None

    @torch.no_grad()
    def update(
        self, ids: Tensor, hidden: Tensor, head: Callable[[Tensor], Tensor], valid: Tensor
    ) -> None:
        """Observe one forward.

        Args:
            ids: New tokens, int64 `[B, n]`.
            hidden: Final hidden states of the new tokens, `[B, n, d_model]`.
            head: Turns hidden states into logits.
            valid: Which columns so far are tokens, bool `[B, S]`.
        """
        batch, n = ids.shape
        new = valid[:, valid.shape[1] - n :]
        # A token is predicted by the hidden state of the last token before it, and padding may lie
        # between the two. Index 0 is the last token of all earlier forwards.
        first = hidden.new_zeros(batch, 1, hidden.shape[-1]) if self._last is None else self._last
        states = torch.cat([first, hidden], 1)
        index = torch.where(new, torch.arange(1, n + 1, device=ids.device), 0)
        running = index.cummax(-1).values
        before = torch.cat([torch.zeros_like(running[:, :1]), running[:, :-1]], 1)
        gather = before[..., None].expand(-1, -1, hidden.shape[-1])
        source = states.gather(1, gather)
        out = torch.empty(batch, n, device=ids.device)
        vocabulary = head(source[:, :1]).shape[-1]
        block = max(1, _BLOCK // (batch * vocabulary))
        for start in range(0, n, block):
            logits = head(source[:, start : start + block]).float()
            target = ids[:, start : start + block, None].to(logits.device)
            log = logits.logsumexp(-1) - logits.gather(-1, target)[..., 0]
            out[:, start : start + block] = log.to(out.device)
        if self._last is None:  # a sequence's first token has no prediction
            out = out.masked_fill(before == 0, float("nan"))
        else:
            # A sequence that has had nothing but padding so far starts here.
            started = valid[:, : valid.shape[1] - n].any(-1, keepdim=True)
            out = out.masked_fill((before == 0) & ~started, float("nan"))
        end = running[:, -1:, None].expand(-1, -1, hidden.shape[-1])
        self._last = states.gather(1, end)
        old = self._surprisal
        self._surprisal = out if old is None else torch.cat([old, out], 1)

    def read(self, valid: Tensor) -> Tensor:
        """Return each column's surprisal, float32 `[B, S]`; a first token gets the largest one."""
        assert self._surprisal is not None
        known = valid.to(self._surprisal.device) & ~self._surprisal.isnan()
        most = self._surprisal.masked_fill(~known, 0.0).amax(-1, keepdim=True)
        return torch.where(known, self._surprisal, most)

    def fork(self) -> Self:
        """Return an observer that can continue without changing this one."""
        return copy.copy(self)

    def sequence(self, row: int, tokens: int) -> Self:
        """The observer of one sequence; see `kvbench.plugin.Separable`."""
        assert self._surprisal is not None and self._last is not None
        other, here = copy.copy(self), slice(row, row + 1)
        other._surprisal, other._last = self._surprisal[here, -tokens:], self._last[here]
        return other

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join sequences in one batch; shorter ones are padded on the left."""
        out = cls()
        held = [p._surprisal for p in parts if p._surprisal is not None]
        width = max(x.shape[1] for x in held)
        pad = torch.nn.functional.pad
        out._surprisal = torch.cat([pad(x, (width - x.shape[1], 0)) for x in held])
        out._last = torch.cat([p._last for p in parts if p._last is not None])
        return out


def column_sums(
    q: Tensor, k: Tensor, at: Tensor, position: Tensor, scale: float, power: int = 1
) -> Tensor:
    """Sum causal softmax attention over queries, block of queries by block of queries.

    The sums are exact: the softmax of a query is over all its keys at once. A block holds at most
    `B * H_q * block * S` float32 weights. Cost: `H_q n S d` flops per sequence if `n = S`.

    Args:
        q: Queries `[B, H_q, n, d]`, in the order of their tokens, the newest last.
        k: Keys `[B, H, S, d]`.
        at: Logical position of every query, int64 `[B, n]`; -1 if it does not exist.
        position: Logical position of every key, int64 `[B, S]`; -1 if it does not exist.
        scale: Factor of the logits.
        power: Power of the weights before they are summed, 1 or 2.

    Returns:
        float32 `[B, H_q, S]`.
    """
    batch, query_heads, n = q.shape[:3]
    heads, columns = k.shape[1:3]
    transposed = k.float().transpose(-1, -2)
    total = torch.zeros(batch, heads, query_heads // heads, columns, device=q.device)
    on_cpu = q.device.type == "cpu"
    block = max(1, (_CPU_BLOCK if on_cpu else _BLOCK) // (query_heads * columns))
    # Without padding only the newest columns need a mask. A GPU would have to wait for the answer.
    unpadded = on_cpu and bool((position >= 0).all()) and bool((at >= 0).all())
    for start in range(0, n, block):
        stop = min(start + block, n)
        ahead = max(columns - (n - stop), 1)  # later columns belong to later tokens
        masked = ahead - (stop - start) if unpadded else 0
        rows = q[:, :, start:stop].float() * scale
        mine, theirs = at[:, None, start:stop, None], position[:, None, None, masked:ahead]
        hidden = ((theirs > mine) | (theirs < 0))[:, :, None]
        logits = rows.unflatten(1, (heads, -1)).flatten(2, 3) @ transposed[..., :ahead]
        logits = logits.view(batch, heads, -1, stop - start, ahead)
        logits[..., masked:].masked_fill_(hidden, float("-inf"))
        weights = logits.softmax(-1)
        if not unpadded:  # a query that does not exist sees no key, so its softmax is NaN
            weights = weights.masked_fill_((mine < 0)[:, :, None], 0.0)
        total[..., :ahead] += weights.sum(3) if power == 1 else weights.square_().sum(3)
    return total.flatten(1, 2)
