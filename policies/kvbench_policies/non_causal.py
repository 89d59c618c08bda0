"""Attention without the causal mask within chunks, one of the two parts of Compactor.

Chari, Van Durme: Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate
Leverage Scores, arXiv 2507.08143. Logits are not scaled, as in both of the authors' programs
(compactor-vllm, and `NonCausalAttnPress` in kvpress).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from kvbench.plugin import ModelInfo, Need, Observer, Score, View
from kvbench_policies.leverage import standardised
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class ChunkAttention(Need):
    """Attention that every token receives in its chunk of the text, times the length of its value.

    float32 `[B, H, S]` by position, for all tokens of the text, evicted or not; 0 for those that
    are left out. Its chunks go on after a cut.

    Attributes:
        chunk: Tokens of a chunk.
        first: Number of first tokens that are left out.
        last: Number of last tokens that are left out.
        padded: Whether zero queries and keys fill the last chunk.
    """

    chunk: int
    first: int
    last: int
    padded: bool

    def observer(self, model: ModelInfo) -> Observer:
        """Make the observer."""
        return _Chunks(self)


class _Open(NamedTuple):
    """What is known of a layer.

    Attributes:
        closed: What tokens received in complete chunks, by position, `[B, H, S]`.
        chunks: Number of complete chunks, int64 `[B]`.
        query: Queries behind the complete chunks, `[B, H_q, w, d]`, the oldest first.
        key: Their keys, `[B, H, w, d]`.
        size: Lengths of their values, float32 `[B, H, w]`.
        live: Which of them exist, bool `[B, w]`; these are in front.
    """

    closed: Tensor
    chunks: Tensor
    query: Tensor
    key: Tensor
    size: Tensor
    live: Tensor


class _Chunks:
    """Sums the attention of complete chunks; holds the queries and keys of the chunk that is open.

    Args:
        need: Size of the chunks, and the tokens that are left out.
    """

    def __init__(self, need: ChunkAttention) -> None:
        self.need = need
        self._held: dict[int, _Open] = {}

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
        n, chunk = q.shape[2], self.need.chunk
        position = (valid.long().cumsum(-1) - 1)[:, -n:]
        live = valid[:, -n:] & (position >= self.need.first)
        key, size = k[:, :, -n:], v[:, :, -n:].float().norm(dim=-1)
        closed = q.new_zeros(len(q), k.shape[1], 0, dtype=torch.float32)
        chunks = position.new_zeros(len(q))
        if layer in self._held:
            old = self._held[layer]
            closed, chunks = old.closed, old.chunks
            q, key = torch.cat([old.query, q], 2), torch.cat([old.key, key], 2)
            size, live = torch.cat([old.size, size], 2), torch.cat([old.live, live], 1)
        order = (~live).to(torch.int8).argsort(dim=-1, stable=True)
        count = live.sum(-1)
        complete = (count - self.need.last).clamp(min=0) // chunk
        most = max(0, live.shape[1] - self.need.last) // chunk
        closed = pad(closed, (0, valid.shape[1] - closed.shape[-1]))
        full = torch.full_like(count, chunk)
        for number in range(most):
            column = order[:, number * chunk : (number + 1) * chunk]
            found = received(_at(q, column), _at(key, column), full) * _at(size, column)
            start = self.need.first + (chunks + number) * chunk
            closed = _written(closed, found, start, full.masked_fill(number >= complete, 0))
        # What is left fits in one chunk and the last tokens.
        width = min(live.shape[1], chunk + self.need.last)
        place = (complete * chunk)[:, None] + torch.arange(width, device=q.device)
        column = order.gather(1, place.clamp(max=live.shape[1] - 1))
        left = place < count[:, None]
        self._held[layer] = _Open(
            closed, chunks + complete, _at(q, column), _at(key, column), _at(size, column), left
        )

    def read(self, layer: int) -> Tensor:
        """Return what every token received, by position, float32 `[B, H, S]`."""
        held, chunk = self._held[layer], self.need.chunk
        count = (held.live.sum(-1) - self.need.last).clamp(min=0)
        fill = max(0, chunk - held.live.shape[1]) if self.need.padded else 0
        query, key = (pad(x, (0, 0, 0, fill))[:, :, :chunk] for x in (held.query, held.key))
        found = received(query, key, count, padded=self.need.padded)
        found = found * pad(held.size, (0, fill))[..., :chunk]
        return _written(held.closed, found, self.need.first + held.chunks * chunk, count)

    def fork(self) -> Self:
        """Return an observer that can continue without changing this one."""
        other = type(self)(self.need)
        other._held = dict(self._held)
        return other

    def sequence(self, row: int, tokens: int) -> Self:
        """The observer of one sequence; see `kvbench.plugin.Separable`."""
        other = self.fork()
        for layer, held in self._held.items():
            own = _Open(*(x[row : row + 1] for x in held))
            other._held[layer] = own._replace(closed=own.closed[..., :tokens])  # by position
        return other

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join the sequences of several observers in one batch."""
        out = cls(parts[0].need)
        for layer in parts[0]._held:
            held = [p._held[layer] for p in parts]
            long = max(x.closed.shape[-1] for x in held)
            wide = max(x.live.shape[-1] for x in held)
            fill = [wide - x.live.shape[-1] for x in held]
            rows = list(zip(held, fill, strict=True))
            out._held[layer] = _Open(
                torch.cat([pad(x.closed, (0, long - x.closed.shape[-1])) for x in held]),
                torch.cat([x.chunks for x in held]),
                torch.cat([pad(x.query, (0, 0, 0, f)) for x, f in rows]),
                torch.cat([pad(x.key, (0, 0, 0, f)) for x, f in rows]),
                torch.cat([pad(x.size, (0, f)) for x, f in rows]),
                torch.cat([pad(x.live, (0, f)) for x, f in rows]),
            )
        return out


def _at(x: Tensor, column: Tensor) -> Tensor:
    """Columns (int64 `[B, m]`) of `x`, `[B, K, n]` or `[B, K, n, d]`."""
    index = column[:, None].expand(-1, x.shape[1], -1)
    if x.dim() == 4:
        index = index[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index)


def _written(into: Tensor, found: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """Copy `into` `[B, H, S]` with the first `count` of `found` `[B, H, c]` from `start` on."""
    step = torch.arange(found.shape[-1], device=found.device)
    dump = into.shape[-1]
    place = torch.where(step < count[:, None], start[:, None] + step, dump)
    index = place[:, None].expand(-1, into.shape[1], -1)
    return pad(into, (0, 1)).scatter(-1, index, found)[..., :dump]


def received(query: Tensor, key: Tensor, count: Tensor, padded: bool = False) -> Tensor:
    """Attention that the keys of a chunk receive from all of its queries, without a causal mask.

    Args:
        query: `[B, H_q, c, d]`.
        key: `[B, H, c, d]`.
        count: How many of the chunk's tokens exist, int64 `[B]`; these are in front.
        padded: Whether the others take part as zero queries and keys.

    Returns:
        Sum over queries, mean over the query heads of a KV head, float32 `[B, H, c]`.
    """
    heads, c = key.shape[1:3]
    real = torch.arange(c, device=key.device) < count[:, None]
    query, key = (x.float().masked_fill(~real[:, None, :, None], 0.0) for x in (query, key))
    logits = query.unflatten(1, (heads, -1)).flatten(2, 3) @ key.transpose(-1, -2)
    logits = logits.unflatten(2, (-1, c))
    if not padded:
        logits = logits.masked_fill(~real[:, None, None, None], float("-inf"))
    weights = logits.softmax(-1)
    if not padded:
        weights = weights.masked_fill(~real[:, None, None, :, None], 0.0)
    return weights.sum(3).mean(2)


def pooled_attention(v: View, need: ChunkAttention) -> Tensor:
    """Mean over each token and its two neighbours in the text, float32 `[B, H, n]`.

    Zeros lie beyond the ends and where tokens are left out.
    """
    pooled = avg_pool1d(v.obs[need], 3, stride=1, padding=1)
    return pooled.gather(-1, v.position.clamp(0, pooled.shape[-1] - 1))


@dataclass(frozen=True)
class NonCausalAttention(Score):
    """Attention that an entry receives from its chunk, times the length of its value.

        a_i = || v_i || mean_{g in group} sum_{q in chunk} softmax_{j in chunk}( q_g . k_j )_i

    averaged over each token and its two neighbours, and standardised over the entries of the layer.
    Later tokens of a chunk count as well as earlier ones, and logits are not scaled.

    Attributes:
        chunk: Tokens of a chunk; the last one can be shorter.
        variant: `paper`, or `release` (kvpress): zero queries and keys fill the last chunk.
    """

    name: ClassVar[str] = "non_causal"
    chunk: int = 256
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        """Check the range."""
        check_count("chunk", self.chunk, 1)

    @property
    def needs(self) -> frozenset[Need]:
        """The attention within chunks."""
        return frozenset({self._need})

    @property
    def _need(self) -> ChunkAttention:
        return ChunkAttention(self.chunk, 0, 0, self.variant == "release")

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        return standardised(pooled_attention(v, self._need), v.valid)
