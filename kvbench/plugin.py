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
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.moments import Moment
from kvbench.view import (
    AttentionMass,
    ModelInfo,
    Need,
    Observer,
    PerToken,
    Queries,
    Surprisal,
    View,
)

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
    "PerToken",
    "Policy",
    "Queries",
    "Score",
    "Scored",
    "Scores",
    "Selector",
    "Surprisal",
    "View",
    "protect_nothing",
    "protect_sinks",
    "protect_window",
]

PLUGIN_API = 1
"""Version of this page; it rises when a plugin written against it would break."""


@dataclass
class Scores:
    """What a score says of the entries of one layer.

    Attributes:
        value: How much an entry is worth, finite float32 `[B, H, n]`; where `valid` is false it is
            ignored.
        protect: Entries that are kept before all others, `[B, H, n]`: bool (true means `WINDOW`),
            or int8 classes, where a higher class gives way later (see `protect_window` and
            `protect_sinks`). If the protected entries do not fit a head's share, the lowest class
            gives way first. Within a class the oldest entry gives way first, with two exceptions:
            of the sinks the last one does, so that position 0 stays longest; of `CHOSEN`, the class
            of what a first stage has chosen, the entry of smallest value does.
    """

    value: Tensor
    protect: Tensor

    CHOSEN: ClassVar[int] = 1
    WINDOW: ClassVar[int] = 2
    SINK: ClassVar[int] = 3
    NEWEST: ClassVar[int] = 4

    def __post_init__(self) -> None:
        """Make classes of a mask."""
        if self.protect.dtype == torch.bool:
            self.protect = self.protect.to(torch.int8) * Scores.WINDOW


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
    """Protect the first `sinks` tokens of every sequence; position 0 gives way last."""
    return ((v.position < sinks) & v.valid).to(torch.int8) * Scores.SINK


@dataclass(frozen=True)
class Part:
    """A part of a policy. Its dataclass fields are its parameters (int, float, bool or str)."""

    name: ClassVar[str] = ""
    """What `score=`, `allocate=`, `select=` or `merge=` calls it: its entry point's name."""

    @property
    def version(self) -> int:
        """Version of what this part computes; 1 at first.

        Raise it when the part, with its present parameters, may keep other entries or store other
        values than before. A version above 1 is part of a cell's hash, so that a resumed run
        generates the responses of such cells again instead of mixing old and new ones. A class
        whose instances have all changed declares `version = 2`; a property can decide by the
        parameters.
        """
        return 1

    @property
    def needs(self) -> frozenset[Need]:
        """What the engine must observe for this part."""
        return frozenset()

    def fingerprint(self, model: str) -> str:
        """Digest of what this part reads from files for a model; joins the hash of a cell.

        Args:
            model: The model's id or folder, as in `ModelInfo.name`.

        Raises:
            UserError: There is no such file for the model.
        """
        return ""

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Give a copy that reads made-up files, for a model that has none; `kvbench check` asks.

        Args:
            model: What the files must fit.
            folder: Where they are written; what is there already may be taken.
        """
        return self

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

    @property
    def tail(self) -> int:
        """Tokens at a prompt's end that a chunked prefill takes in after its last cut.

        They count in the budget: the cut leaves room for them. `v.coming` tells it to the score.
        """
        return 0

    def score(self, v: View) -> Scores | Tensor:
        """Score the entries of one layer; a plain tensor protects nothing."""
        raise NotImplementedError

    def step(self, v: View) -> None:
        """Update the extras after new entries were appended (moment `decode`)."""

    def log_retention(self, v: View) -> Tensor | None:
        """Give `log beta`, 0 or less, float32 `[B, H, n]`: after `a` steps `beta**a` is left.

        For scores that say once of every token how fast it fades; `kvbench analyze retention` draws
        it. None: this score does not say.
        """
        return None


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

    def prepare(self, v: View, scores: Scores) -> Scores:
        """Give the scores that allocator and `select` get.

        A selector of two stages may protect (class `Scores.CHOSEN`) what its first stage is sure to
        keep, so that the allocator counts it.
        """
        return scores

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
            state: Kept between the cuts of one cache and layer, empty at first; axis 0 of every
                tensor is the batch.
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
        moments: The moments for which its paper defines it; it runs at all of them.
        cost: Time and extra memory of a cut, per layer, in one line.
        base: The registered policy that this one varies.
        spelling: The canonical spelling; `kvbench.policy` sets it and `origin`.
        origin: The package and version that registers it, or the digest of its file.
    """

    name: str
    score: Score | None
    allocate: Allocator
    select: Selector
    merge: Merger | None = None
    summary: str = ""
    paper: str = ""
    buffer: int = 128
    moments: tuple[Moment, ...] = field(default=("context", "question"), compare=False)
    cost: str = field(default="", compare=False)
    base: Policy | None = field(default=None, compare=False, repr=False)
    # Not copied by `dataclasses.replace`: a changed policy has another spelling.
    spelling: str = field(default="", init=False, compare=False, repr=False)
    origin: str = field(default="", init=False, compare=False, repr=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that there are: score, allocator, selector, merger."""
        found = (self.score, self.allocate, self.select, self.merge)
        return tuple(p for p in found if p is not None)

    @property
    def needs(self) -> frozenset[Need]:
        """Everything that the engine must observe for this policy."""
        return frozenset().union(*(p.needs for p in self.parts))

    @property
    def part_versions(self) -> dict[str, int]:
        """Versions of the parts above 1, by kind and name, for example `{"merge.value": 2}`."""
        kinds = ("score", "allocate", "select", "merge")
        parts = ((kind, getattr(self, kind)) for kind in kinds)
        return {f"{kind}.{p.name}": p.version for kind, p in parts if p and p.version > 1}

    def fingerprint(self, model: str) -> str:
        """Digest of all files that the parts read for a model; "" where they read none."""
        return "|".join(filter(None, (p.fingerprint(model) for p in self.parts)))

    def stand_in(self, model: ModelInfo, folder: Path) -> Policy:
        """Give a policy whose parts read made-up files of a model (see `Part.stand_in`)."""
        return dataclasses.replace(
            self,
            score=self.score and self.score.stand_in(model, folder),
            allocate=self.allocate.stand_in(model, folder),
            select=self.select.stand_in(model, folder),
            merge=self.merge and self.merge.stand_in(model, folder),
        )

    @property
    def is_full(self) -> bool:
        """Whether nothing is ever evicted."""
        return self.score is None

    def __str__(self) -> str:
        return self.spelling or self.name
