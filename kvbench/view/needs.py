"""What a part of a policy may ask the engine to observe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor

from kvbench.view.model import ModelInfo


class Observer(Protocol):
    """Accumulates one kind of observation over the forwards of a prefill, in all layers."""

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
        """Observe one forward of one layer.

        Args:
            layer: Index among the full-attention layers.
            q: New queries after RoPE, `[B, H_q, n, d]`.
            k: All keys so far, the new ones last, `[B, H, S, d]`; after the cache was cut, only
                the keys of the new tokens.
            v: The values of the same tokens.
            hidden: New hidden states that enter the attention block, `[B, n, d_model]`.
            valid: Which columns are tokens rather than padding, bool `[B, S]`.
            scale: Factor of the logits, usually `1 / sqrt(d)`.
        """
        ...

    def fork(self) -> Self:
        """Return an observer that can continue without changing this one."""
        ...

    def read(self, layer: int) -> Tensor:
        """Return what was observed in a layer; the `Need` documents its shape."""
        ...

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Join the sequences of several observers in one batch (not for per-entry needs)."""
        ...


@runtime_checkable
class Separable(Protocol):
    """An observer that can be split into its sequences.

    Contexts are prefilled in one batch only if all their observers can.
    """

    def sequence(self, row: int, tokens: int) -> Observer:
        """The observer of one sequence without its padding.

        Args:
            row: The sequence.
            tokens: How many tokens it has: the last columns of the batch.
        """
        ...


@dataclass(frozen=True)
class Need:
    """Something the engine observes for a part. Hashable; equal needs are observed once."""

    per_entry: ClassVar[bool] = False
    """The observation has one value per cache entry, on its last axis."""
    of_tokens: ClassVar[bool] = False
    """The observation is about tokens, not layers, and is known when a forward has ended."""
    at_end: ClassVar[bool] = False
    """The observation is known when a prefill has ended."""
    goes_on: ClassVar[bool] = False
    """Per entry; the engine keeps it with the entries from one cut of a cache to the next."""

    def observer(self, model: ModelInfo) -> Observer:
        """Make the observer for this need. A need of your own must implement this method.

        The engine has the observers of the needs on this page.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement observer()")


@dataclass(frozen=True)
class Queries(Need):
    """The last `window` queries after RoPE, `[B, H_q, window, d]`, newest last.

    A sequence with fewer tokens has zeros in front; `View.window_attention` masks them.
    """

    window: int = 32


@dataclass(frozen=True)
class AttentionMass(Need):
    """Attention that every entry received, summed over queries, float32 `[B, H_q, n]`.

    The sums are exact; they are computed by blocks of queries, never as a `T x T` matrix. If a
    cache is cut more than once, the engine keeps the sum with every entry and adds the attention
    of each new query.

    Attributes:
        observe: Count only this many last queries of a prefill (None: all).
        power: 1, or 2 for the sum of squared weights.
    """

    observe: int | None = None
    power: int = 1
    per_entry: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True


@dataclass(frozen=True)
class PerToken(Need):
    """A number that each token gets once per layer and KV head: float32 `[B, H, n]`.

    A subclass computes it in `measure`; a learned gate is the usual case. The engine keeps the
    number with the entry for as long as the entry is held.
    """

    per_entry: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True

    def measure(self, layer: int, hidden: Tensor, key: Tensor, value: Tensor, model: ModelInfo) -> Tensor:
        """Compute the number for new tokens, float32 `[B, H, n]`; the value for padding is ignored.

        Args:
            layer: Index among the full-attention layers.
            hidden: Hidden states that enter the attention block, after its norm, `[B, n, d_model]`.
            key: Keys of the new tokens after RoPE, `[B, H, n, d]`.
            value: Their values, `[B, H, n, d]`.
            model: The model; `model.project(layer, hidden)` returns `q, k, v` before RoPE.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Surprisal(Need):
    """`-log p(token | all tokens before it)` under the model itself, float32 `[B, H, n]`.

    It is the same in all heads and layers. The first token of a sequence, which nothing predicts,
    gets the largest value of its sequence. The model predicts from what its cache holds: evicted
    entries do not contribute.
    """

    of_tokens: ClassVar[bool] = True


@dataclass(frozen=True)
class Replay(Need):
    """Largest attention that every entry receives while the context is fed once more.

    float32 `[B, H, n]`, the maximum over the queries of the replay and the query heads of a KV
    head. The context is replayed chunk by chunk when its prefill has ended; the engine does so once
    for all policies, and books the time with each of them. It is present at the first cut only.

    Attributes:
        chunk: Tokens of a chunk. Entries are seen by the replay of their own chunk.
        sinks: First tokens that also take part in the softmax.
        norm: Weight the attention by `||v W_O||_2` over the length of the query's hidden state.
    """

    chunk: int = 2048
    sinks: int = 4
    norm: bool = False
    per_entry: ClassVar[bool] = True
    at_end: ClassVar[bool] = True
