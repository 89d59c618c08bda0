"""The page a plugin author reads: a policy, its four parts, and what they are shown.

A policy is a choice of parts. `Score` says how much a cache entry is worth, `Allocator` how the
budget spreads over layers and KV heads, `Selector` which entries fill a head's share, `Merger` what
becomes of the evicted. Any score may meet any allocator, selector and merger.

The shortest plugin is one function of a `View` that returns a float tensor `[B, H, n]`, larger for
entries worth keeping; its keyword parameters become parameters of the policy:

    def value_norm(v: View, power: float = 1.0) -> torch.Tensor:
        return v.value.float().norm(dim=-1) ** power

Use it as `--policy ./my_policy.py:value_norm`, or register it as an entry point of the group
`kvbench.policies`. Whoever needs more subclasses a part and names a `Policy`.

Shapes: `B` sequences, `H` KV heads, `H_q` query heads, `G = H_q / H`, `n` entries shown, `d` head
dim, `T` context tokens, `L` full-attention layers.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.needs import AttentionMass, ModelInfo, Need, Observer, Queries

__all__ = [
    "PLUGIN_API",
    "Allocator",
    "AttentionMass",
    "Merger",
    "ModelInfo",
    "Moment",
    "Need",
    "Observer",
    "Part",
    "Policy",
    "Queries",
    "Score",
    "Scored",
    "Scores",
    "Selector",
    "View",
    "protect_nothing",
    "protect_sinks",
    "protect_window",
]

PLUGIN_API = 1
"""Version of this page; it rises when a plugin written against it would break."""

Moment = Literal["context", "question", "decode", "chunked", "turns"]


class View:
    """One layer at one moment, the rows that belong to one policy.

    Entries stand in the order of their columns, so the last valid one is the newest.

    Attributes:
        layer: Index among the full-attention layers, `0 <= layer < model.layers`.
        moment: When the cache is compressed.
        length: Tokens that the sequence has seen, padding not counted, int64 `[B]`.
        col: Logical column of every entry, int64 `[B, H, n]` (padding counts: see `position`).
        position: Logical position of every entry, int64 `[B, H, n]`: the first token has 0, the
            newest has `length - 1`, whatever was evicted between.
        valid: Which entries exist, bool `[B, H, n]`.
        key: Keys after RoPE, `[B, H, n, d]`.
        value: Values, `[B, H, n, d]`.
        obs: What was observed, by `Need`. Per-entry needs are there when a prefill is cut and in
            `Score.step`, not at a later cut: what must last goes into the extras.
        extras: Per-entry state of the policy by name, `[B, H, n]`; a score may assign to it.
        model: The model's shapes and its output projections.
        scale: Factor of the attention logits.
        seed: Noise seed of every row, int64 `[B]`, from the run's seed and the context's tokens.
    """

    def __init__(
        self,
        *,
        layer: int,
        moment: Moment,
        length: Tensor,
        col: Tensor,
        position: Tensor,
        valid: Tensor,
        key: Tensor,
        value: Tensor,
        obs: Mapping[Need, Tensor],
        extras: dict[str, Tensor],
        model: ModelInfo,
        scale: float,
        seed: Tensor,
        budget: Tensor,
    ) -> None:
        self.layer = layer
        self.moment: Moment = moment
        self.length = length
        self.col = col
        self.position = position
        self.valid = valid
        self.key = key
        self.value = value
        self.obs = obs
        self.extras = extras
        self.model = model
        self.scale = scale
        self.seed = seed
        self._budget = budget
        self.read_budget = False

    @property
    def budget(self) -> Tensor:
        """Mean entries per (layer, KV head), `b`, int64 `[B]`.

        A score that reads it is computed anew for every budget; one that does not is shared.
        """
        self.read_budget = True
        return self._budget

    @property
    def age(self) -> Tensor:
        """`t - i`: how far behind the newest token every entry lies, int64 `[B, H, n]`."""
        return self.length[:, None, None] - 1 - self.position

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(B, H, n)`."""
        b, h, n = self.valid.shape
        return b, h, n

    def grouped(self, per_query_head: Tensor, how: str = "mean") -> Tensor:
        """Reduce a tensor `[B, H_q, ...]` over the query heads of each KV head to `[B, H, ...]`.

        Args:
            per_query_head: One value per query head on axis 1.
            how: `mean`, `max` or `sum` over the group.
        """
        x: Tensor = per_query_head.unflatten(1, (self.model.kv_heads, self.model.group))
        if how == "max":
            return x.amax(2)
        return x.sum(2) if how == "sum" else x.mean(2)

    def window_attention(self, window: int) -> Tensor:
        """Attention of the last `window` queries on the entries, causal among themselves.

        Softmax in float32 over all entries shown. Rows of the window that do not exist (a sequence
        shorter than it) are zero.

        Returns:
            float32 `[B, H_q, window, n]`.
        """
        q = self.obs[Queries(window)].float()
        b, h, n = self.shape
        q = q.unflatten(1, (h, self.model.group)).flatten(2, 3)
        logits = (q @ self.key.float().transpose(-1, -2)) * self.scale
        logits = logits.view(b, h, self.model.group, -1, n)
        behind = torch.arange(window - 1, -1, -1, device=q.device)
        seen = (self.age[:, :, None, :] >= behind[:, None]) & self.valid[:, :, None, :]
        logits = logits.masked_fill(~seen[:, :, None], float("-inf"))
        real = (behind < self.length[:, None])[:, None, None, :, None]
        attention = torch.softmax(logits, -1).nan_to_num(0.0) * real
        return attention.flatten(1, 2)

    def noise(self) -> Tensor:
        """Uniform noise in [0, 1), float32 `[B, H, n]`.

        Fixed by (seed, context, layer, head, position). It comes from a counter and not from a
        generator, so it depends neither on the batch nor on the order in which cells run.
        """
        h = self.valid.shape[1]
        head = torch.arange(h, device=self.col.device)[None, :, None]
        x = self.seed[:, None, None] + 0x9E3779B1 * (self.layer * 1024 + head) + self.position
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = x & 0xFFFFFFFF
            x = (x ^ (x >> shift)) * factor
        x = x & 0xFFFFFFFF
        x = x ^ (x >> 16)
        return (x >> 8).to(torch.float32) / float(1 << 24)


@dataclass
class Scores:
    """What a score says of the entries of one layer.

    Attributes:
        value: How much an entry is worth, finite float32 `[B, H, n]`; where `valid` is false it is
            ignored.
        protect: Entries that are kept before all others, `[B, H, n]`: bool, or int8 classes of
            which the higher give way later (see `protect_window` and `protect_sinks`). Where the
            protected entries do not fit a head's share the lowest class goes first, its oldest
            entry first.
    """

    value: Tensor
    protect: Tensor

    WINDOW: ClassVar[int] = 1
    SINK: ClassVar[int] = 2
    NEWEST: ClassVar[int] = 3


def protect_nothing(v: View) -> Tensor:
    """Protection classes that protect no entry, int8 `[B, H, n]`."""
    return torch.zeros(v.shape, dtype=torch.int8, device=v.col.device)


def protect_window(v: View, window: int | Tensor) -> Tensor:
    """Protect the last `window` tokens (an int, or int64 `[B]`); the newest gives way last."""
    size = window if isinstance(window, int) else window[:, None, None]
    classes = ((v.age < size) & v.valid).to(torch.int8) * Scores.WINDOW
    newest = (v.age == 0) & v.valid & (classes > 0)
    return torch.where(newest, Scores.NEWEST, classes).to(torch.int8)


def protect_sinks(v: View, sinks: int) -> Tensor:
    """Protect the first `sinks` tokens of every sequence."""
    return ((v.position < sinks) & v.valid).to(torch.int8) * Scores.SINK


@dataclass(frozen=True)
class Part:
    """A part of a policy. Its dataclass fields are its parameters (int, float, bool or str)."""

    name: ClassVar[str] = ""
    """What `score=`, `allocate=`, `select=` or `merge=` calls it: its entry point's name."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the engine must observe for this part."""
        return frozenset()

    def parameters(self) -> dict[str, Any]:
        """Parameters and their values, in order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    def parameter_types(self) -> dict[str, Any]:
        """Types of the parameters."""
        hints = typing.get_type_hints(type(self))
        return {f.name: hints[f.name] for f in dataclasses.fields(self) if f.init}

    def replace(self, **changes: Any) -> Self:
        """Give a copy with other parameters; a part checks their range in `__post_init__`."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Score(Part):
    """How much an entry is worth."""

    extras: ClassVar[Mapping[str, torch.dtype]] = {}
    nonnegative: ClassVar[bool] = False
    """Values are never below zero (attention), so that products with norms keep their meaning."""

    def score(self, v: View) -> Scores | Tensor:
        """Score the entries of one layer; a plain tensor protects nothing."""
        raise NotImplementedError

    def step(self, v: View) -> None:
        """Update the extras after new entries were appended (moment `decode`)."""


class Scored(NamedTuple):
    """A layer's view and its scores, as an allocator gets them."""

    view: View
    scores: Scores


@dataclass(frozen=True)
class Allocator(Part):
    """How the budget spreads. Every sequence gets exactly its total, no head more than it has."""

    scope: ClassVar[Literal["head", "layer", "model"]] = "head"
    """What it must see at once. Below `model` a layer's K/V are freed as soon as it is done."""

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Spread the total over layers before any layer is seen (scopes `head` and `layer`).

        Args:
            model: The model's shapes.
            length: Tokens of every sequence, int64 `[B]`.
            budget: Mean entries per (layer, head), `b`, int64 `[B]`.

        Returns:
            Entries of every layer, int64 `[B, L]`, summing to `L * H * b`.
        """
        return (budget * model.kv_heads)[:, None].expand(-1, model.layers)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Spread a total over heads.

        Args:
            layers: One layer, or with scope `model` all of them.
            total: Entries that these layers keep together, int64 `[B]`.

        Returns:
            Entries of every head, int64 `[B, len(layers), H]`, summing to `total`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Selector(Part):
    """Which entries fill a head's share."""

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Choose exactly `share` (int64 `[B, H]`) valid entries per head, bool `[B, H, n]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Merger(Part):
    """What becomes of the evicted entries."""

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Give the keys and values to store, `[B, H, n, d]` each; only rows in `keep` are read.

        Args:
            v: The layer before eviction.
            keep: What stays, bool `[B, H, n]`.
            state: Kept between the cuts of one cache and layer, empty at first.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Policy:
    """A named choice of parts. Immutable; `str()` gives the canonical spelling.

    Attributes:
        name: What `--policy` calls it.
        score: How much an entry is worth; None keeps everything (`full`).
        allocate: How the budget spreads.
        select: Which entries fill a head's share.
        merge: What becomes of the evicted; None drops them.
        summary: One line for `kvbench list policies`.
        paper: Where it comes from, with the equation or algorithm.
        buffer: Entries a head may hold beyond its budget before a cut at decode.
        base: The registered policy that this one varies.
    """

    name: str
    score: Score | None
    allocate: Allocator
    select: Selector
    merge: Merger | None = None
    summary: str = ""
    paper: str = ""
    buffer: int = 128
    base: Policy | None = field(default=None, compare=False, repr=False)

    @property
    def needs(self) -> frozenset[Need]:
        """Everything that the engine must observe for this policy."""
        parts = (self.score, self.allocate, self.select, self.merge)
        return frozenset().union(*(p.needs for p in parts if p is not None))

    @property
    def is_full(self) -> bool:
        """Whether nothing is ever evicted."""
        return self.score is None

    def __str__(self) -> str:
        from kvbench.spelling import canonical

        return canonical(self)
