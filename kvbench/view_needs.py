"""What a policy may know of the model, and what the engine observes for it.

Re-exported by `kvbench.plugin`, the page that a plugin author reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor


@dataclass(frozen=True)
class ModelInfo:
    """What a policy may know of the model.

    `output_weight(layer)` gives the output projection of a layer as `[H_q, d, d_model]`, one slice
    per query head (a view of the model's own weight, in its dtype, without a copy).
    `project(layer, hidden)` gives the projections of hidden states `[B, n, d_model]` before RoPE
    and before any norm of queries or keys, `[B, n, (H_q + 2 H) d]`: queries, keys, values.
    """

    name: str
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    hidden_size: int
    output_weight: Callable[[int], Tensor] = field(compare=False, repr=False)
    project: Callable[[int, Tensor], Tensor] | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads per KV head, `G`."""
        return self.query_heads // self.kv_heads


class Observer(Protocol):
    """Accumulates one kind of observation over the forwards of a prefill, for all layers."""

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
        """Take in one forward of one layer.

        Args:
            layer: Index among the full-attention layers.
            q: New queries after RoPE, `[B, H_q, n, d]`.
            k: All keys so far, the new ones last, `[B, H, S, d]`; once the cache has been cut,
                those of the new tokens alone.
            v: The values of the same tokens.
            hidden: New hidden states that enter the attention block, `[B, n, d_model]`.
            valid: Which columns are tokens and not padding, bool `[B, S]`.
            scale: Factor of the logits, usually `1 / sqrt(d)`.
        """
        ...

    def fork(self) -> Self:
        """Give an observer that may go on without changing this one."""
        ...

    def read(self, layer: int) -> Tensor:
        """Give what was observed in a layer; the `Need` says in which shape."""
        ...

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Put the sequences of several observers side by side (not for per-entry needs)."""
        ...

    def take(self, rows: Tensor) -> Self:
        """Give an observer of some sequences, int64 `[b]` (not for per-entry needs)."""
        ...


@dataclass(frozen=True)
class Need:
    """Something that the engine observes for a part. Hashable; equal needs are observed once."""

    per_entry: ClassVar[bool] = False
    """Aligned with the cache entries on its last axis."""
    of_tokens: ClassVar[bool] = False
    """About the tokens and not about a layer; known when a forward has ended."""
    goes_on: ClassVar[bool] = False
    """Per entry, and kept by the engine beside the entries between the cuts of one cache."""

    def observer(self, model: ModelInfo) -> Observer:
        """Make the observer that serves this need."""
        raise NotImplementedError(f"{type(self).__name__} names no observer")


@dataclass(frozen=True)
class Queries(Need):
    """The last `window` queries after RoPE, `[B, H_q, window, d]`, newest last.

    A row with fewer tokens has zeros in front; `View.window_attention` masks them.
    """

    window: int = 32

    def observer(self, model: ModelInfo) -> Observer:
        from kvbench.engine.observers import QueryObserver

        return QueryObserver(self.window)


@dataclass(frozen=True)
class AttentionMass(Need):
    """Attention that every entry received, summed over queries, float32 `[B, H_q, n]`.

    Exact column sums by blocks of queries, never a `T x T` matrix. Where a cache is cut more than
    once the engine keeps the sum beside every entry and adds what each new query gives.

    Attributes:
        observe: Of a prefill, count only that many last queries (None: all).
        power: 1, or 2 for the sum of the squared weights.
    """

    observe: int | None = None
    power: int = 1
    per_entry: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True

    def observer(self, model: ModelInfo) -> Observer:
        from kvbench.engine.observers import MassObserver

        return MassObserver(self.observe, self.power)


@dataclass(frozen=True)
class PerToken(Need):
    """A number that every token gets once, in each layer and KV head: float32 `[B, H, n]`.

    A subclass says in `measure` what it is; a learned gate is the usual case. The engine keeps it
    beside the entry for as long as that is held.
    """

    per_entry: ClassVar[bool] = True
    goes_on: ClassVar[bool] = True

    def measure(
        self, layer: int, hidden: Tensor, key: Tensor, value: Tensor, model: ModelInfo
    ) -> Tensor:
        """Give the number of new tokens, float32 `[B, H, n]`; padding may get any.

        Args:
            layer: Index among the full-attention layers.
            hidden: What enters the attention block, after its norm, `[B, n, d_model]`.
            key: Keys of the new tokens after RoPE, `[B, H, n, d]`.
            value: Their values, `[B, H, n, d]`.
            model: The model; `model.project(layer, hidden)` gives `q, k, v` before RoPE.
        """
        raise NotImplementedError

    def observer(self, model: ModelInfo) -> Observer:
        from kvbench.engine.observers import TokenObserver

        return TokenObserver(self, model)


@dataclass(frozen=True)
class Surprisal(Need):
    """`-log p(token | all tokens before it)` under the model itself, float32 `[B, H, n]`.

    The same in all heads and layers; a sequence's first token takes the largest of its sequence.
    What is evicted is evicted for this too: the model predicts from what its cache holds.
    """

    of_tokens: ClassVar[bool] = True
