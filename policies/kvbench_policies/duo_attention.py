"""DuoAttention: retrieval heads keep everything, streaming heads sinks and a recent window.

Xiao, Tang, Zuo, Guo, Yang, Tang, Fu, Han: DuoAttention: Efficient Long-Context LLM Inference with
Retrieval and Streaming Heads, arXiv 2410.10819. The paper learns which heads are which; here they
are ranked by the head profile that `kvbench profile heads` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import TopK, apportion
from kvbench.plugin import ModelInfo, Policy, Score, Scored, Scores, View
from kvbench.profiles.allocators import Profiled


@dataclass(frozen=True)
class SinksRecent(Score):
    """The first tokens, then the most recent ones.

    In a share that is too small for all the sinks the first of them stay, behind the newest token,
    which stays in any share. (`streaming_llm`'s score differs there: its oldest sinks go first.)

    Attributes:
        sinks: First tokens of the sequence that go before recent ones.
    """

    name: ClassVar[str] = "sinks_recent"
    sinks: int = 128

    def __post_init__(self) -> None:
        """Check the range."""
        _check_sinks(self.sinks)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, `-age`, of the sinks `-position`, `[B, H, n]`."""
        sink = v.valid & (v.position < self.sinks)
        newest = v.valid & (v.age == 0)
        protect = sink.to(torch.int8) * Scores.CHOSEN
        protect = torch.where(newest, Scores.NEWEST, protect).to(torch.int8)
        return Scores(-torch.where(sink, v.position, v.age).float(), protect)


def _check_sinks(sinks: int) -> None:
    if sinks < 0:
        raise UserError(f"sinks={sinks}: a number of tokens, 0 or more, would be right")


@dataclass(frozen=True)
class Retrieval(Profiled):
    """Sinks and a recent window for every head; what is left, whole, to the best by the profile.

    First `s = min(sinks + recent, b, T)` entries are reserved for each head. Then, from the head of
    the highest profile down (ties to the lower layer, then head), a head is filled up to the `T`
    tokens of the context until `N` is spent; the last one may be filled in part. Which entries a
    share holds is the score's affair: with `duo_attention`'s own score the sinks and the most
    recent tokens.

    Where the engine gives a layer another total than this plan, its heads are filled by the same
    rule within the layer.

    Attributes:
        sinks: First tokens that a streaming head holds; the score's sinks bear the same name.
        recent: Recent tokens that a streaming head holds.
    """

    name: ClassVar[str] = "retrieval"
    scope: ClassVar[Literal["head", "layer", "model"]] = "layer"
    sinks: int = 128
    recent: int = 256

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_sinks(self.sinks)
        if self.recent < 1:
            raise UserError(f"recent={self.recent}: a number of tokens, 1 or more, would be right")

    def shares(self, model: ModelInfo, length: Tensor, budget: Tensor) -> Tensor:
        """Entries of every layer, int64 `[B, L]`, summing to `L * H * b`."""
        heads = model.layers * model.kv_heads
        most = length[:, None].expand(-1, heads)
        reserved = torch.minimum(self._reserved(budget)[:, None], most)
        worth = self._worth(model, length.device).flatten()
        spread = fill_by_rank(worth, budget * heads, reserved, most)
        return spread.view(-1, model.layers, model.kv_heads).sum(-1)

    def allocate(self, layers: Sequence[Scored], total: Tensor) -> Tensor:
        """Spread a layer's total (int64 `[B]`) over its heads, int64 `[B, 1, H]`."""
        ((v, _),) = layers
        most = v.valid.sum(-1)
        reserved = torch.minimum(self._reserved(v.budget)[:, None], most)
        worth = self._worth(v.model, most.device)[v.layer]
        return fill_by_rank(worth, total, reserved, most)[:, None]

    def _reserved(self, budget: Tensor) -> Tensor:
        return budget.clamp(max=self.sinks + self.recent)

    def _worth(self, model: ModelInfo, device: torch.device) -> Tensor:
        return torch.tensor(self.load_profile(model).scores, dtype=torch.float64).to(device)


def fill_by_rank(worth: Tensor, total: Tensor, reserved: Tensor, most: Tensor) -> Tensor:
    """Fill heads up from the worthiest down, after a reserve for each.

    Args:
        worth: Of every head, `[K]`; ties to the lower index.
        total: What is spread, int64 `[B]`, at most the sum of `most`.
        reserved: What each head has first, int64 `[B, K]`; where the total is smaller than their
            sum, it is spread evenly below them.
        most: What each head can hold, int64 `[B, K]`, at least `reserved`.

    Returns:
        int64 `[B, K]` summing to `total`.
    """
    order = worth.argsort(descending=True, stable=True)
    floor = reserved.sum(-1)
    even = apportion(torch.ones_like(reserved).double(), total.minimum(floor), reserved)
    room = (most - reserved)[:, order]
    left = (total - floor).clamp(min=0)[:, None]
    extra = torch.minimum(room, (left - (room.cumsum(-1) - room)).clamp(min=0))
    return even.scatter_add(1, order.expand_as(reserved), extra)


DUO_ATTENTION = Policy(
    name="duo_attention",
    score=SinksRecent(),
    allocate=Retrieval(),
    select=TopK(),
    summary="the best heads by profile keep everything, the others 128 sinks and 256 recent tokens",
    paper="arXiv 2410.10819",
    moments=("context", "question", "chunked"),
    cost="time O(T), memory O(T)",
)
