"""The page for plugin authors: a policy, its parts, and what they see.

A policy that evicts combines four parts. A `Score` rates cache entries, an `Allocator` divides the
budget among layers and KV heads, a `Selector` picks the entries that each head keeps, and a
`Merger` uses what is evicted. Any score works with any allocator, selector and merger. A policy
that evicts nothing can have a `Reader` instead, which chooses the entries that each query reads.

The shortest plugin is one function of a `View` that returns a float tensor `[B, H, n]`, larger for
entries worth keeping; its keyword parameters become parameters of the policy:

    def value_norm(v: View, power: float = 1.0) -> torch.Tensor:
        return v.value.float().norm(dim=-1) ** power

Use it as `--policy ./my_policy.py:value_norm`, or register it as an entry point of the group
`kvbench.policies`. If you need more, subclass a part and define a `Policy`.

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

from kvbench.errors import UserError
from kvbench.moments import Moment
from kvbench.view import (
    AttentionMass,
    Blocks,
    ModelInfo,
    Need,
    Observer,
    PerToken,
    Pruned,
    Queries,
    Replay,
    Scores,
    Separable,
    Surprisal,
    View,
    VisualTokens,
    protect_nothing,
    protect_sinks,
    protect_window,
)

__all__ = [
    "PLUGIN_API",
    "Allocator",
    "AttentionMass",
    "Blocks",
    "Merger",
    "ModelInfo",
    "Moment",
    "Need",
    "Observer",
    "Part",
    "PerToken",
    "Policy",
    "Pruned",
    "Queries",
    "Reader",
    "Replay",
    "Score",
    "Scored",
    "Scores",
    "Selector",
    "Separable",
    "Surprisal",
    "View",
    "VisualTokens",
    "protect_nothing",
    "protect_sinks",
    "protect_window",
]


PLUGIN_API = 1
"""Version of this page; it rises when a plugin written against it would break."""

CHANNEL_QUERIES = Queries(32)
"""The queries that choose the channels of pruned keys; 32 as in ThinK."""


@dataclass(frozen=True)
class Part:
    """A part of a policy. Its dataclass fields are its parameters (int, float, bool or str)."""

    name: ClassVar[str] = ""
    """Its name in `score=`, `allocate=`, `select=`, `merge=` or `read=`: its entry point's."""

    @property
    def version(self) -> int:
        """Version of what this part computes; starts at 1.

        Raise it when the part, with its present parameters, may keep other entries or store other
        values than before. A version above 1 is part of a cell's hash, so a resumed run generates
        the responses of such cells again instead of mixing old and new ones. If all instances of a
        class have changed, declare `version = 2`; if it depends on the parameters, use a property.
        """
        return 1

    @property
    def needs(self) -> frozenset[Need]:
        """What the engine must observe for this part."""
        return frozenset()

    def fingerprint(self, model: str) -> str:
        """Digest of the files that this part reads for a model; it is part of a cell's hash.

        Args:
            model: The model's id or folder, as in `ModelInfo.name`.

        Raises:
            UserError: The model has no such file.
        """
        return ""

    def reserved(self, length: int) -> int:
        """Entries of every head, in `length` tokens, that stay for their place alone: a window."""
        return 0

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Return a copy that reads made-up files, so that `kvbench check` can try it on any model.

        Args:
            model: The model that the files are for.
            folder: Where to write them; files that are already there may be used.
        """
        return self

    def parameters(self) -> dict[str, Any]:
        """Parameters and their values, in order."""
        return {
            parameter.name: getattr(self, parameter.name) for parameter in dataclasses.fields(self) if parameter.init
        }

    def parameter_types(self) -> dict[str, Any]:
        """Types of the parameters."""
        type_hints = typing.get_type_hints(type(self))
        return {parameter.name: type_hints[parameter.name] for parameter in dataclasses.fields(self) if parameter.init}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other parameters; a part checks their range in `__post_init__`."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Score(Part):
    """Rates entries."""

    extras: ClassVar[Mapping[str, torch.dtype]] = {}
    nonnegative: ClassVar[bool] = False
    """Whether values are never negative (attention), so that products with norms make sense."""
    reads_tower: ClassVar[bool] = False
    """Whether `prune` reads the attention of the vision tower."""

    @property
    def prunes(self) -> int | None:
        """The first layer that does not see the visual tokens that `prune` drops.

        0: they are dropped before the language model. None: the score prunes nothing.
        """
        return None

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Choose the visual tokens of a prompt that stay; called once in its prefill."""
        raise NotImplementedError

    @property
    def tail(self) -> int:
        """Tokens at the end of a prompt that a chunked prefill processes after its last cut.

        They count towards the budget, so the cut leaves room for them. The score sees their number
        in `v.coming`.
        """
        return 0

    def score(self, v: View) -> Scores | Tensor:
        """Rate the entries of one layer; a plain tensor protects nothing."""
        raise NotImplementedError

    def step(self, v: View) -> None:
        """Update the extras after new entries were appended (moment `decode`)."""

    def log_retention(self, v: View) -> Tensor | None:
        """Return `log beta`, at most 0, float32 `[B, H, n]`: after `a` steps `beta**a` is left.

        For scores that predict once per token how fast it fades; `kvbench analyze retention` plots
        it. None if the score makes no such prediction.
        """
        return None


class Scored(NamedTuple):
    """The view and the scores of a layer, as passed to allocators."""

    view: View
    scores: Scores


@dataclass(frozen=True)
class Allocator(Part):
    """Divides the budget. A sequence gets exactly its total; a head gets at most what it has."""

    scope: ClassVar[Literal["head", "layer", "model"]] = "head"
    """What it needs to see at once. Unless it is `model`, each layer's K/V are freed right away."""

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Divide the total among layers before any layer is seen (scopes `head` and `layer`).

        Args:
            model: The model's shapes.
            length: Tokens of every sequence, int64 `[B]`.
            budget: Mean entries per (layer, head), `b`, int64 `[B]`.

        Returns:
            Entries of every layer, int64 `[B, L]`, summing to `L * H * b`.
        """
        return (budget * model.kv_heads)[:, None].expand(-1, model.layers)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Divide a total among heads.

        Args:
            layers: One layer; all layers if the scope is `model`.
            total: Entries that these layers keep in all, int64 `[B]`.

        Returns:
            Entries of every head, int64 `[B, len(layers), H]`, summing to `total`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Selector(Part):
    """Picks the entries that each head keeps."""

    def prepare(self, v: View, scores: Scores) -> Scores:
        """Return the scores to pass to the allocator and to `select`.

        A selector with two stages can protect what its first stage will keep (class
        `Scores.CHOSEN`), so that the allocator counts it.
        """
        return scores

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Choose exactly `share` (int64 `[B, H]`) valid entries per head, bool `[B, H, n]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Merger(Part):
    """Merges evicted entries into those that stay."""

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values to store, `[B, H, n, d]` each; only rows in `keep` are read.

        Args:
            v: The layer before eviction.
            keep: The entries that stay, bool `[B, H, n]`.
            state: Tensors that are kept between cuts of the same cache and layer, empty at first;
                axis 0 of every tensor is the batch.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Reader(Part):
    """Chooses the entries that each query reads; the cache holds all of them.

    With a budget of `b` entries, a query reads exactly `b` of those that its KV head holds so far,
    or all if there are fewer: the block of the newest entry, then the blocks of the best ratings,
    the newer of two equals first. Of a block that the budget only reaches into, it reads the newest
    entries.

    What dense layers read beyond `b` is taken from the others, which share the rest evenly, the
    first ones getting one more where it does not divide: over all layers a query still reads `b`
    entries per (layer, KV head).

    Attributes:
        dense_layers: First full-attention layers in which a query reads all entries.
    """

    dense_layers: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the range; a reader with a check of its own calls this one as well."""
        if self.dense_layers < 0:
            raise UserError(f"dense_layers={self.dense_layers} is invalid; use 0 or more layers")

    def block(self, model: ModelInfo) -> int:
        """Entries of a block."""
        raise NotImplementedError

    def summary(self, model: ModelInfo) -> int:
        """Numbers that a KV head keeps of a complete block to rate it, in the cache's data type.

        They count as held and as read, although kvbench itself computes them anew for every query.
        """
        raise NotImplementedError

    def rate(self, v: Blocks) -> Tensor:
        """Rate the blocks of one layer for every query, float32 `[H, n, K]`, larger for better."""
        raise NotImplementedError


@dataclass(frozen=True)
class Policy:
    """A named choice of parts. Immutable; `str()` gives the canonical spelling.

    Attributes:
        name: Its name for `--policy`.
        score: Rates entries; None evicts nothing.
        allocate: Divides the budget.
        select: Picks the entries that each head keeps.
        merge: Merges evicted entries into those that stay; None drops them.
        read: Chooses what each query reads, if nothing is evicted; None reads all that is held.
        summary: One line for `kvbench list policies`.
        paper: The source, with the equation or algorithm.
        buffer: Entries that a head may hold beyond its budget before a cut at moment `decode`.
        bits: Bits of a number in a quantised cache (2, 4 or 8); None: K and V are not quantised.
        group_size: Entries of a head, and channels, that are quantised together.
        residual: Newest entries of a head that are neither quantised nor pruned.
        key_channels: The share of its channels that a key keeps, more than 0, at most 1: all.
        quantizer: What makes the codes of a quantised cache: `kivi`, `hqq` or `quanto`.
        moments: The moments for which its paper defines it; it runs at all of them.
        cost: Time and extra memory of a cut, per layer, in one line.
        group: Its group, whose name stands for all its policies; "" for none.
        base: The registered policy that this one is a variant of.
        spelling: The canonical spelling; `kvbench.policy` sets it and `origin`.
        origin: The package and version that registers it, or the digest of its file.
    """

    name: str
    score: Score | None
    allocate: Allocator
    select: Selector
    merge: Merger | None = None
    read: Reader | None = None
    summary: str = ""
    paper: str = ""
    buffer: int = 128
    bits: int | None = None
    group_size: int = 32
    residual: int = 32
    key_channels: float = 1.0
    quantizer: str = "kivi"
    moments: tuple[Moment, ...] = field(default=("context", "question"), compare=False)
    cost: str = field(default="", compare=False)
    group: str = field(default="", compare=False)
    base: Policy | None = field(default=None, compare=False, repr=False)
    # Not copied by `dataclasses.replace`: a changed policy has another spelling.
    spelling: str = field(default="", init=False, compare=False, repr=False)
    origin: str = field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check that the parts belong together."""
        if self.score is not None and self.read is not None:
            raise UserError(f"{self.name} has a score and a reader; evict entries or read few")

    @property
    def parts(self) -> tuple[Part, ...]:
        """Score, allocator, selector, merger and reader, without those that are None."""
        return tuple(self._by_kind.values())

    @property
    def _by_kind(self) -> dict[str, Part]:
        part_kinds = ("score", "allocate", "select", "merge", "read")
        return {part_kind: component for part_kind in part_kinds if (component := getattr(self, part_kind)) is not None}

    @property
    def needs(self) -> frozenset[Need]:
        """Everything that the engine must observe for this policy."""
        channel_needs: set[Need] = set() if self.key_channels == 1 else {CHANNEL_QUERIES}
        return frozenset(channel_needs.union(*(component.needs for component in self.parts)))

    @property
    def part_versions(self) -> dict[str, int]:
        """Versions of the parts above 1, by kind and name, for example `{"merge.value": 2}`."""
        components = self._by_kind.items()
        return {
            f"{part_kind}.{component.name}": component.version
            for part_kind, component in components
            if component.version > 1
        }

    def fingerprint(self, model: str) -> str:
        """Digest of all files that the parts read for a model; "" where they read none."""
        return "|".join(filter(None, (component.fingerprint(model) for component in self.parts)))

    def stand_in(self, model: ModelInfo, folder: Path) -> Policy:
        """Give a policy whose parts read made-up files of a model (see `Part.stand_in`)."""
        replacements: Any = {
            part_kind: component.stand_in(model, folder) for part_kind, component in self._by_kind.items()
        }
        return dataclasses.replace(self, **replacements)

    @property
    def evicts(self) -> bool:
        """Whether anything is ever evicted."""
        return self.score is not None

    @property
    def recodes(self) -> bool:
        """Whether entries are not stored as they are: quantised, or with fewer channels."""
        return self.bits is not None or self.key_channels < 1

    @property
    def has_budget(self) -> bool:
        """Whether a budget limits anything: the entries that are held, or those that are read."""
        return self.evicts or self.read is not None

    @property
    def is_full(self) -> bool:
        """Whether this is the full cache: nothing is evicted, left unread or stored otherwise."""
        return not self.has_budget and not self.recodes

    def __str__(self) -> str:
        return self.spelling or self.name
