"""Observations that a part of a policy can require from the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from torch import Tensor


class Observer(Protocol):
    """Accumulates one kind of observation over the forward passes of a prefill, in all layers."""

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
        """Observe one forward pass of one layer.

        Args:
            layer: Index among the full-attention layers.
            q: New queries after RoPE, `[B, H_q, n, d]`.
            k: All keys so far, the new ones last, `[B, H, S, d]`; after an eviction step, only the keys of the new
                tokens.
            v: The values of the same tokens.
            hidden: Hidden states of the new tokens at the input of the attention block, `[B, n, d_model]`.
            valid: Which columns are tokens rather than padding, bool `[B, S]`.
            scale: Scale of the attention logits, usually `1 / sqrt(d)`.
        """
        ...

    def fork(self) -> Self:
        """Return an independent copy."""
        ...

    def read(self, layer: int) -> Tensor:
        """Return the observation of a layer; the `Need` documents its shape."""
        ...

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Join the sequences of several observers in one batch (not for per-entry needs)."""
        ...


@runtime_checkable
class Separable(Protocol):
    """An observer that can be split by sequence, as batched prefill requires of all observers."""

    def sequence(self, row: int, tokens: int) -> Observer:
        """Return the observer of one sequence without its padding.

        Args:
            row: Index of the sequence in the batch.
            tokens: Length of the sequence; its tokens are the last columns of the batch.
        """
        ...


@dataclass(frozen=True)
class Need:
    """An observation that the engine makes for a part. Hashable; equal needs are observed once."""

    per_entry: ClassVar[bool] = False
    """Whether the observation has one value per cache entry, on its last axis."""
    of_tokens: ClassVar[bool] = False
    """Whether the observation is per token, not per layer, and known only after a forward pass."""
    at_end: ClassVar[bool] = False
    """Whether the observation is known only after a prefill."""
    goes_on: ClassVar[bool] = False
    """Whether the engine keeps this per-entry observation from one eviction step to the next."""
    informed: ClassVar[bool] = False
    """Whether the observation depends on tokens that follow the cached ones, which no method knows in use."""

    def observer(self, model: ModelInfo) -> Observer:
        """Return a new observer. Custom needs must implement this; the engine provides those of this module."""
        raise NotImplementedError(f"{type(self).__name__} does not implement observer()")


@dataclass(frozen=True)
class Queries(Need):
    """The last `window` queries after RoPE, `[B, H_q, window, d]`, newest last.

    A sequence with fewer tokens has zeros in front; `View.window_attention` masks them.
    """

    window: int = 32


@dataclass(frozen=True)
class AttentionMass(Need):
    """Accumulated attention of every entry, summed over queries, float32 `[B, H_q, n]`.

    The sums are exact; they are computed in blocks of queries, never as a `T x T` matrix. Between eviction steps, the
    engine keeps the sum of every entry and adds the attention of each new query.

    Attributes:
        observe: Count only the last N queries of a prefill; None counts all.
        power: 1, or 2 for the sum of squared weights.
    """

    observe: int | None = None
    power: int = 1
    per_entry: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True


@dataclass(frozen=True)
class PerToken(Need):
    """A number computed once per token, layer and KV head, float32 `[B, H, n]`.

    Subclasses compute it in `measure`, usually with a learned gate. The engine keeps it as long as the entry.
    """

    per_entry: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True

    def measure(self, layer: int, hidden: Tensor, key: Tensor, value: Tensor, model: ModelInfo) -> Tensor:
        """Compute the number for new tokens, float32 `[B, H, n]`; the value for padding is ignored.

        Args:
            layer: Index among the full-attention layers.
            hidden: Hidden states at the input of the attention block, after its norm, `[B, n, d_model]`.
            key: Keys of the new tokens after RoPE, `[B, H, n, d]`.
            value: Values of the new tokens, `[B, H, n, d]`.
            model: `model.project(layer, hidden)` returns `q, k, v` before RoPE.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Surprisal(Need):
    """`-log p(token | all tokens before it)` under the model itself, float32 `[B, H, n]`.

    It is the same in all heads and layers. The first token of a sequence, which has no prediction, gets the largest
    value of its sequence. Evicted entries do not contribute to the prediction.
    """

    of_tokens: ClassVar[bool] = True


@dataclass(frozen=True)
class Replay(Need):
    """Largest attention that every entry receives in a second pass over the context, float32 `[B, H, n]`.

    The maximum is over the queries of the replay and the query heads of a KV head. The context is replayed chunk by
    chunk after its prefill, once for all policies; the time is added to each of them. Present only at the first
    eviction step.

    Attributes:
        chunk: Tokens per chunk. An entry is seen only by the queries of its own chunk.
        sinks: First tokens that also take part in the softmax.
        norm: Weight the attention by `||v W_O||_2` divided by the norm of the query's hidden state.
    """

    chunk: int = 2048
    sinks: int = 4
    norm: bool = False
    per_entry: ClassVar[bool] = True
    at_end: ClassVar[bool] = True


@dataclass(frozen=True)
class AnswerAttention(Need):
    """Attention that every entry receives from the tokens that follow it, float32 `[B, H, n]`.

    These are the question, if it is not in the cache yet, and the answer without its last token, which is never fed.
    They are fed to a copy of the full cache after the prefill; their attention is summed over tokens and averaged over
    the query heads of a KV head. Present only at the first eviction step.

    Attributes:
        target: `full`: the full cache's own greedy answer; `reference`: the whole reference answer (several are joined
            with commas).
    """

    target: Literal["full", "reference"] = "full"
    per_entry: ClassVar[bool] = True
    at_end: ClassVar[bool] = True
    informed: ClassVar[bool] = True


@dataclass(frozen=True)
class ModelInfo:
    """Shapes and projections of the model.

    `output_weight(layer)` returns the output projection of a layer as `[H_q, d, d_model]`, one slice per query head
    (every call copies it, in the weight's own dtype).
    `project(layer, hidden)` projects hidden states `[B, n, d_model]` to queries, keys and values, before RoPE and
    before any query or key norm: `[B, n, (H_q + 2 H) d]`.
    `rotary(layer, position)` returns the cosines and sines with which RoPE rotates queries and keys of a layer at text
    positions `[n]`, float32 `[n, r]` each. RoPE applies to the first `r` of `d` channels and pairs channel `c` with
    channel `c + r/2`. Both tensors include the attention scaling factor that some RoPE variants use. In layers without
    RoPE, cosines are 1 and sines 0. If a layer rotates in another way, or the model has no RoPE, it raises `UserError`.
    """

    name: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    hidden_size: int
    output_weight: Callable[[int], Tensor] = field(compare=False, repr=False)
    project: Callable[[int, Tensor], Tensor] | None = field(default=None, compare=False, repr=False)
    rotary: Callable[[int, Tensor], tuple[Tensor, Tensor]] | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per KV head, `G`."""
        return self.query_heads // self.kv_heads
