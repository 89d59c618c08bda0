"""DuoAttention: retrieval heads keep everything, streaming heads keep sinks and a recent window.

Xiao, Tang, Zuo, Guo, Yang, Tang, Fu, Han: DuoAttention: Efficient Long-Context LLM Inference with Retrieval and
Streaming Heads, arXiv 2410.10819. The paper learns which heads retrieve; kvbench ranks them by the profile from
`kvbench profile heads`. Streaming heads keep 64 sinks and 256 recent tokens, as in the repository's evaluation scripts
(its gates are trained with 128).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, apportion
from kvbench.plugin import ModelInfo, Policy, Range, Scored
from kvbench.profiles.allocators import Profiled
from kvbench_policies.local import Recency
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class SinksRecent(Recency):
    """Score of a streaming head: `recency` with more sinks.

    Attributes:
        sinks: Number of protected first tokens; the newest token is protected, too.
    """

    name: ClassVar[str] = "sinks_recent"
    version = 2  # version 1 had 128 sinks
    sinks: int = 64


@dataclass(frozen=True)
class Retrieval(Profiled):
    """Sinks and a recent window for every head; the best heads keep the whole context.

    Each head first gets `s = min(sinks + recent, b, T)` entries. Heads are then filled up to the `T` tokens of the
    context, from the highest profile down (ties go to the lower layer, then the lower head), until `N` is used up; the
    last head may be filled in part. If `sinks + recent` exceeds `b`, all heads get the same budget and no head
    retrieves; a warning is shown once. If a layer's total differs from this plan, its heads are filled by the same
    rule.

    Attributes:
        sinks: Number of first tokens that a streaming head keeps; also a parameter of the score.
        recent: Number of recent tokens that a streaming head keeps.
    """

    name: ClassVar[str] = "retrieval"
    searched: ClassVar[Mapping[str, Range]] = {"sinks": Range(0, 128), "recent": Range(16, 512, log=True)}
    scope: ClassVar[Literal["head", "layer", "model"]] = "layer"
    version = 2  # version 1 had 128 sinks
    sinks: int = 64
    recent: int = 256

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 1)

    def reserved(self, length: int) -> int:
        """Return the number of sinks and recent tokens."""
        return self.sinks + self.recent

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Return the entries per layer, int64 `[B, L]`, summing to `L * H * b`."""
        if bool(((budget <= self.sinks + self.recent) & (budget < length)).any()):
            warn_of_full_floor(self.sinks, self.recent, "duo_attention (allocate=retrieval)", "head")
        head_count = model.layers * model.kv_heads
        capacity = length[:, None].expand(-1, head_count)
        reserved_counts = torch.minimum(self._reserved(budget)[:, None], capacity)
        rank_keys = self._worth(model, length.device).flatten()
        head_shares = fill_by_rank(rank_keys, budget * head_count, reserved_counts, capacity)
        return head_shares.view(-1, model.layers, model.kv_heads).sum(-1)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Distribute a layer's total (int64 `[B]`) over its heads, int64 `[B, 1, H]`."""
        ((view, _),) = layers
        capacity = view.valid.sum(-1)
        reserved_counts = torch.minimum(self._reserved(view.budget)[:, None], capacity)
        rank_keys = self._worth(view.model, capacity.device)[view.layer]
        return fill_by_rank(rank_keys, total, reserved_counts, capacity)[:, None]

    def _reserved(self, budget: Tensor) -> Tensor:
        return budget.clamp(max=self.sinks + self.recent)

    def _worth(self, model: ModelInfo, device: torch.device) -> Tensor:
        return torch.tensor(self.load_profile(model).scores, dtype=torch.float64).to(device)


def warn_of_full_floor(sinks: int, recent: int, label: str, unit: str) -> None:
    """Warn that sinks and recent tokens take the whole budget of every head or layer."""
    # The text has no numbers of this batch, because Python shows equal warnings only once.
    warnings.warn(
        f"{label}: {sinks} sinks and {recent} recent tokens fill the budget of every {unit}, so no "
        f"{unit} keeps the whole context; use a larger --budget, or smaller sinks= and recent=",
        stacklevel=3,
    )


def fill_by_rank(rank_keys: Tensor, total_entries: Tensor, reserves: Tensor, capacity: Tensor) -> Tensor:
    """Reserve entries for every head or layer, then fill them up in rank order.

    Args:
        rank_keys: Rank of every head or layer, largest first, `[K]` or `[B, K]`; ties go to the lower index.
        total_entries: Entries to distribute, int64 `[B]`, at most the sum of `capacity`.
        reserves: Entries reserved for each, int64 `[B, K]`; a total below their sum is distributed evenly up to these
            counts. capacity: Maximum entries of each, int64 `[B, K]`, at least `reserves`.

    Returns:
        int64 `[B, K]` summing to `total_entries`.
    """
    by_rank = rank_keys.argsort(dim=-1, descending=True, stable=True).expand_as(reserves)
    floor_sums = reserves.sum(-1)
    base_shares = apportion(torch.ones_like(reserves).double(), total_entries.minimum(floor_sums), reserves)
    headroom = (capacity - reserves).gather(1, by_rank)
    remaining = (total_entries - floor_sums).clamp(min=0)[:, None]
    additions = torch.minimum(headroom, (remaining - (headroom.cumsum(-1) - headroom)).clamp(min=0))
    return base_shares.scatter_add(1, by_rank, additions)


DUO_ATTENTION = Policy(
    name="duo_attention",
    score=SinksRecent(),
    allocate=Retrieval(),
    select=TopK(),
    summary="the best heads by profile keep everything, the others 64 sinks and 256 recent tokens",
    paper="arXiv 2410.10819",
    moments=("context", "question", "chunked"),
    cost="time O(T), memory O(T)",
)
