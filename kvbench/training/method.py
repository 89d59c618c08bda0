"""Interface by which a package registers gates for `kvbench train gates`.

An entry point of the group `kvbench.trainers` names a `Method`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from kvbench.plugin import Blocks, ModelInfo

Objective = Literal["distil", "regress", "replay", "compress", "match"]


class Attention(Protocol):
    """Retention-gated causal attention.

    Queries are `[B, H_q, T, d]`, keys and values `[B, H, T, d]`, log_beta float32 `[B, H, T]`,
    valid bool `[B, T]` or None. The result is `[B, H_q, T, d]`.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_beta: Tensor,
        *,
        scale: float,
        gating: Any = ...,
        valid: Tensor | None = ...,
    ) -> Tensor: ...


class Capacity(Protocol):
    """Capacity loss of log_beta (float32 `[B, L, H, T]`) for `budget` tokens per head."""

    def __call__(
        self,
        log_beta: Tensor,
        budget: int,
        *,
        scope: Any = ...,
        reduce: Any = ...,
        valid: Tensor | None = ...,
    ) -> Tensor: ...


class Compress(Protocol):
    """Compression of a layer to `budget` entries per head, with gradients for the trained module.

    Keys and values are `[B, H, n, d]`, mass (accumulated attention) is float32 `[B, H, n]`, valid bool `[B, H, n]`. The
    result is keys, values, mass and valid of the kept entries.
    """

    def __call__(
        self,
        gates: Any,
        layer: int,
        key: Tensor,
        value: Tensor,
        mass: Tensor,
        valid: Tensor,
        budget: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class Gates(Protocol):
    """Module of gates; only the method of its objective is required (none for `compress`).

    Hidden states are `[B, n, d_model]`, keys and values `[B, H, n, d]`, qkv `[B, n, (H_q + 2 H) d]`. The first two
    methods return float32 `[B, H, n]`.

    Attributes:
        block: Entries per block; for `match`.
    """

    block: int

    def log_beta(self, layer: int, hidden: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the log retention of tokens, 0 or less; for `distil`."""
        ...

    def score(self, layer: int, hidden: Tensor, *, qkv: Tensor | None = None) -> Tensor:
        """Return predictions for tokens; for `regress`, which passes `qkv`, and `replay`."""
        ...

    def rate(self, v: Blocks) -> Tensor:
        """Return the logits of blocks for every query, float32 `[H, n, K]`; for `match`."""
        ...


@dataclass(frozen=True)
class Method:
    """Kind of gates and their training method.

    Attributes:
        name: The policy that uses the gates.
        objective: `distil`: a student with retention-gated attention learns to answer like the teacher; `regress`:
            gates learn to predict the logits of the answer's queries; `replay`: gates learn to predict the log of
            KVzip+ scores from a replay; `compress`: a module that merges entries learns from the next tokens after an
            eviction step; `match`: gates learn the distribution of every query's attention over earlier blocks.
        scope: Scope of the capacity loss: `head`, or `global` for one budget over all heads.
        defaults: Settings of the paper by name: `lr`, `schedule`, `weight_decay`, `capacity`, `length`, `bias`,
            `hidden_dim`, `gate`, `input`, `tied`, `gating`, `gate_dim`; for `replay` also `passes`; for `compress` also
            `chunk`, `kernel_size`, `keep_rate`, `mix`; for `match` also `block`. Missing settings do not apply.
        build: Builds the gates (a module as in `Gates`) from the model's shapes, its configuration and all settings.
        save: Writes gates and their training record to a folder, optionally in half precision.
        place: Returns the folder in which the policy looks for a model's gates.
        attention: Gated attention; only for `distil`.
        capacity: Capacity loss; only for `distil`.
        compress: Compresses a layer; only for `compress`.
    """

    name: str
    objective: Objective
    scope: str
    defaults: Mapping[str, Any]
    build: Callable[[ModelInfo, Any, Mapping[str, Any]], nn.Module]
    save: Callable[[nn.Module, Path, Mapping[str, Any], bool], None]
    place: Callable[[str], Path]
    attention: Attention | None = None
    capacity: Capacity | None = None
    compress: Compress | None = None
