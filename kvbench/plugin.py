"""The plugin API: a policy, its parts, and the data that they receive.

A policy that evicts combines four parts. A `Score` rates cache entries, an `Allocator` divides the budget among layers
and KV heads, a `Selector` picks the entries that each head keeps, and a `Merger` folds evicted entries into kept ones.
Any score works with any allocator, selector and merger. A policy that evicts nothing can have a `Reader` instead,
which chooses the entries that each query attends to.

The shortest plugin is a function that takes a `View` and returns a float tensor `[B, H, n]`, larger for entries worth
keeping; its keyword parameters become parameters of the policy:

    def value_norm(v: View, power: float = 1.0) -> torch.Tensor:
        return v.value.float().norm(dim=-1) ** power

Use it as `--policy ./my_policy.py:value_norm`, or register it as an entry point of the group `kvbench.policies`. If you
need more, subclass a part and define a `Policy`.

Shapes: `B` sequences, `H` KV heads, `H_q` query heads, `G = H_q / H`, `n` entries in the view, `d` head dimension,
`T` context tokens, `L` full-attention layers.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.moments import Moment
from kvbench.view import (
    AnswerAttention,
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
    "AnswerAttention",
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
    "Range",
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
"""Version of the plugin API; raised by changes that break existing plugins."""

CHANNEL_QUERIES = Queries(32)
"""Queries that select the channels of pruned keys; a window of 32, as in ThinK."""


@dataclass(frozen=True)
class Range:
    """Values of a numeric parameter that `kvbench tune` tries; integers if both ends are.

    Attributes:
        low, high: The smallest and the largest value.
        log: Whether values are tried on a logarithmic scale.
        step: Distance of two integers.
    """

    low: int | float
    high: int | float
    log: bool = False
    step: int = 1


@dataclass(frozen=True)
class Part:
    """Base class of the parts of a policy. Dataclass fields are parameters (int, float, bool or str)."""

    name: ClassVar[str] = ""
    """Name in `score=`, `allocate=`, `select=`, `merge=` or `read=`; the same as its entry point's."""

    searched: ClassVar[Mapping[str, Range]] = {}
    """Numeric parameters that `kvbench tune` searches; it also tries every choice of a parameter that has choices."""

    @property
    def version(self) -> int:
        """Version of this part's algorithm; starts at 1.

        Raise it when a change makes the part keep different entries or store different values for the same parameters.
        A version above 1 enters the cell's hash, so a resumed run regenerates the responses of such cells instead of
        mixing old and new ones. Declare `version = 2` if all instances changed; use a property if only some parameter
        values are affected.
        """
        return 1

    @property
    def needs(self) -> frozenset[Need]:
        """Observations that this part requires from the engine."""
        return frozenset()

    def fingerprint(self, model: str) -> str:
        """Return a digest of the files that this part loads for a model; it is part of the cell's hash.

        Args:
            model: The model's id or folder, as in `ModelInfo.name`.

        Raises:
            UserError: The model has no such file.
        """
        return ""

    def reserved(self, length: int) -> int:
        """Return how many of `length` entries each head always keeps because of their position, such as a window."""
        return 0

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Return a copy that loads synthetic files, so that `kvbench check` can run it on any model.

        Args:
            model: The model to write the files for.
            folder: Folder for the files; existing ones may be reused.
        """
        return self

    def parameters(self) -> dict[str, Any]:
        """Return the parameters and their values, in order of declaration."""
        return {
            parameter.name: getattr(self, parameter.name) for parameter in dataclasses.fields(self) if parameter.init
        }

    def parameter_types(self) -> dict[str, Any]:
        """Return the type of each parameter."""
        part_class: Any = type(self)  # mypy takes the `__hash__` of instances for that of the class
        type_hints = _type_hints(part_class)
        return {parameter.name: type_hints[parameter.name] for parameter in dataclasses.fields(self) if parameter.init}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed parameters; validate their range in `__post_init__`."""
        return dataclasses.replace(self, **changes)


@functools.cache
def _type_hints(part_class: type) -> dict[str, Any]:
    return typing.get_type_hints(part_class)


@dataclass(frozen=True)
class Score(Part):
    """Rates cache entries."""

    extras: ClassVar[Mapping[str, torch.dtype]] = {}
    nonnegative: ClassVar[bool] = False
    """Whether scores are never negative (attention), so that they can be multiplied by norms."""
    reads_tower: ClassVar[bool] = False
    """Whether `prune` uses the attention of the vision tower."""

    @property
    def prunes(self) -> int | None:
        """First layer without the visual tokens that `prune` drops.

        0 drops them before the language model. None prunes nothing.
        """
        return None

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Choose the visual tokens of a prompt to keep; called once per prefill."""
        raise NotImplementedError

    @property
    def tail(self) -> int:
        """Tokens at the end of a prompt that a chunked prefill processes after its last eviction step.

        They count towards the budget, so the eviction step leaves room for them. `v.coming` holds their number.
        """
        return 0

    def score(self, v: View) -> Scores | Tensor:
        """Rate the entries of one layer. A plain tensor protects no entry."""
        raise NotImplementedError

    def step(self, v: View) -> None:
        """Update the per-entry state (`v.extras`) after entries are appended (moment `decode`)."""

    def log_retention(self, v: View) -> Tensor | None:
        """Return `log beta`, at most 0, float32 `[B, H, n]`: after `a` steps an entry retains the weight `beta**a`.

        For scores that predict a decay rate once per token; `kvbench analyze retention` plots it. None if the score
        makes no such prediction.
        """
        return None


class Scored(NamedTuple):
    """The view and the scores of a layer, as passed to allocators."""

    view: View
    scores: Scores


@dataclass(frozen=True)
class Allocator(Part):
    """Divides the budget. Every sequence gets exactly its total; a head gets at most as many entries as it holds."""

    scope: ClassVar[Literal["head", "layer", "model"]] = "head"
    """What `allocate` receives at once. Unless it is `model`, each layer's K/V are freed right away."""

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Divide the total among layers before any layer is seen (scopes `head` and `layer`).

        Args:
            model: Shapes of the model.
            length: Tokens per sequence, int64 `[B]`.
            budget: Mean entries per (layer, head), `b`, int64 `[B]`.

        Returns:
            Entries per layer, int64 `[B, L]`, summing to `L * H * b`.
        """
        return (budget * model.kv_heads)[:, None].expand(-1, model.layers)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Divide a total among heads.

        Args:
            layers: One layer; all layers if the scope is `model`.
            total: Entries to keep in these layers together, int64 `[B]`.

        Returns:
            Entries per head, int64 `[B, len(layers), H]`, summing to `total`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Selector(Part):
    """Picks the entries that each head keeps."""

    def prepare(self, v: View, scores: Scores) -> Scores:
        """Return the scores to pass to the allocator and to `select`.

        A two-stage selector can protect the entries of its first stage (class `Scores.CHOSEN`) so that the allocator
        counts them.
        """
        return scores

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Choose exactly `share` (int64 `[B, H]`) valid entries per head, bool `[B, H, n]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Merger(Part):
    """Merges evicted entries into kept ones."""

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values to store, `[B, H, n, d]` each; only rows in `keep` are used.

        Args:
            v: The layer before eviction.
            keep: Entries to keep, bool `[B, H, n]`.
            state: Tensors that persist between eviction steps of the same cache and layer, empty at first; axis 0 is
                the batch.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Reader(Part):
    """Sparse attention selector: chooses the entries that each query reads; the cache keeps all of them.

    With a budget of `b` entries, a query reads exactly `b` of the entries in its KV head, or all if there are fewer:
    first the block of the newest entry, then the blocks with the highest ratings; the newer block wins a tie. If the
    budget covers only part of a block, the newest entries of that block are read.

    Entries that dense layers read beyond `b` are deducted evenly from the other layers (the first ones get any
    remainder), so that a query still reads `b` entries per (layer, KV head) on average.

    Attributes:
        dense_layers: Number of initial full-attention layers in which a query reads all entries.
    """

    dense_layers: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Validate the range; a subclass with its own checks calls this one as well."""
        if self.dense_layers < 0:
            raise UserError(f"dense_layers={self.dense_layers} is invalid; use 0 or more layers")

    def block(self, model: ModelInfo) -> int:
        """Return the number of entries per block."""
        raise NotImplementedError

    def summary(self, model: ModelInfo) -> int:
        """Return how many numbers a KV head stores per complete block to rate it, in the cache's data type.

        They count as held and as read, although kvbench itself recomputes them for every query.
        """
        raise NotImplementedError

    def rate(self, v: Blocks) -> Tensor:
        """Rate the blocks of one layer for every query, float32 `[H, n, K]`; higher is better."""
        raise NotImplementedError


@dataclass(frozen=True)
class Policy:
    """A named combination of parts. Immutable; `str()` gives the canonical spelling.

    Attributes:
        name: Name for `--policy`.
        score: Rates entries; None evicts nothing.
        allocate: Divides the budget.
        select: Picks the entries that each head keeps.
        merge: Merges evicted entries into kept ones; None drops them.
        read: Chooses the entries that each query reads, if nothing is evicted; None reads all entries.
        summary: One line for `kvbench list policies`.
        paper: The source, with the equation or algorithm.
        buffer: Entries that a head may hold beyond its budget before an eviction step at moment `decode`.
        bits: Bits per number in a quantised cache (2, 4 or 8); None if K and V are not quantised.
        group_size: Entries of a head, and channels, that are quantised together.
        residual: Newest entries of a head that are neither quantised nor pruned.
        key_channels: Fraction of its channels that a key keeps, in (0, 1].
        quantizer: Quantisation method: `kivi`, `hqq` or `quanto`.
        moments: Compression points the paper covers; the policy can run at any.
        cost: Time and extra memory of an eviction step, per layer, in one line.
        group: Group name, which selects all policies of the group; "" for none.
        base: The registered policy that this one is a variant of.
        spelling: The canonical spelling; set by `kvbench.policy`, as is `origin`.
        origin: The package and version that registers the policy, or the digest of its file.
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
    # Not copied by `dataclasses.replace`, because a changed policy has a different spelling.
    spelling: str = field(default="", init=False, compare=False, repr=False)
    origin: str = field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Validate that the parts can be combined."""
        if self.score is not None and self.read is not None:
            raise UserError(f"{self.name} has both a score and a reader; use only one of them")

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that are not None: score, allocator, selector, merger and reader."""
        return tuple(self._by_kind.values())

    @property
    def _by_kind(self) -> dict[str, Part]:
        part_kinds = ("score", "allocate", "select", "merge", "read")
        return {part_kind: component for part_kind in part_kinds if (component := getattr(self, part_kind)) is not None}

    @cached_property
    def needs(self) -> frozenset[Need]:
        """All observations that the parts require from the engine."""
        channel_needs: set[Need] = set() if self.key_channels == 1 else {CHANNEL_QUERIES}
        return frozenset(channel_needs.union(*(component.needs for component in self.parts)))

    @property
    def is_informed(self) -> bool:
        """Whether the policy sees what follows the cached tokens, such as the answer: a reference, not a method."""
        return any(need.informed for need in self.needs)

    @property
    def part_versions(self) -> dict[str, int]:
        """Part versions above 1, by kind and name, for example `{"merge.value": 2}`."""
        components = self._by_kind.items()
        return {
            f"{part_kind}.{component.name}": component.version
            for part_kind, component in components
            if component.version > 1
        }

    def fingerprint(self, model: str) -> str:
        """Return a digest of all files that the parts load for a model; "" if there are none."""
        return "|".join(filter(None, (component.fingerprint(model) for component in self.parts)))

    def stand_in(self, model: ModelInfo, folder: Path) -> Policy:
        """Return a copy whose parts load synthetic files (see `Part.stand_in`)."""
        replacements: Any = {
            part_kind: component.stand_in(model, folder) for part_kind, component in self._by_kind.items()
        }
        return dataclasses.replace(self, **replacements)

    @property
    def evicts(self) -> bool:
        """Whether the policy evicts entries."""
        return self.score is not None

    @property
    def recodes(self) -> bool:
        """Whether entries are stored in another form: quantised, or with fewer channels."""
        return self.bits is not None or self.key_channels < 1

    @property
    def has_budget(self) -> bool:
        """Whether a budget applies, to the entries held or to those read."""
        return self.evicts or self.read is not None

    @property
    def is_full(self) -> bool:
        """Whether this is the full cache: all entries are kept, read and stored unchanged."""
        return not self.has_budget and not self.recodes

    def __str__(self) -> str:
        return self.spelling or self.name
