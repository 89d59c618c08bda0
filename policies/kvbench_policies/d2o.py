"""D2O: shares by the variance of attention, and evicted entries merged into their nearest kept one.

Wan, Wu, Zhang and others: D2O: Dynamic Discriminative Operations for Efficient Long-Context
Inference of Large Language Models, arXiv 2406.13035, section 4.2: token eviction (equations 6 to 8)
and dynamic token merging (equations 9 to 12). The shares of the layers (section 4.1) are
`inverse_variance`.

The authors' released code differs from the paper in what `variant=release` names at each part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.errors import UserError
from kvbench.parts import portion, rank_entries
from kvbench.plugin import (
    AttentionMass,
    Merger,
    Need,
    Policy,
    Score,
    Scores,
    Selector,
    View,
    protect_nothing,
    protect_sinks,
)
from kvbench_policies.inverse_variance import InverseVariance
from kvbench_policies.merging import pack, put, sum_into, sum_rows_into, take

_BLOCK = 1 << 25
"""Similarities held at once, in float32 (128 MiB)."""


@dataclass(frozen=True)
class Accumulated(Score):
    """`s_i = sum_q A[q, i]` over all queries, nothing protected.

    As `mass`, H2O's score, but without a window: `important_recent` takes the window from each
    head's own share.

    Attributes:
        observe: Of a prefill, count only that many last queries (none: all).
        group: How the query heads of a KV head are reduced: `mean`, `max` or `sum`.
    """

    name: ClassVar[str] = "accumulated"
    nonnegative: ClassVar[bool] = True
    observe: int | None = None
    group: Literal["mean", "max", "sum"] = "mean"

    def __post_init__(self) -> None:
        """Check the range."""
        if self.observe is not None and self.observe < 1:
            raise UserError(
                f"observe={self.observe}: a number of queries, 1 or more, or none would be right"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """The attention that every entry received."""
        return frozenset({AttentionMass(self.observe)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        mass = v.grouped(v.obs[AttentionMass(self.observe)], self.group)
        return Scores(mass, protect_nothing(v))


@dataclass(frozen=True)
class ImportantRecent(Selector):
    """A share of every head for its recent tokens, the rest for sinks and the largest scores.

    Of a head's share `n` the last `floor(recent * n)` tokens are kept, at least the newest, and the
    first `sinks` tokens; the largest scores fill the rest. Where that does not fit the oldest
    tokens of the window go first, then sinks, the newest token last. What the score protects is
    protected as well.

    Attributes:
        recent: Share of a head's share; none is the variant's: 0.25 (3:1, paper), 0.5 (1:1,
            release).
        sinks: First tokens of the sequence that are protected.
        variant: `paper`, or `release` (the authors' code).
    """

    name: ClassVar[str] = "important_recent"
    recent: float | None = None
    sinks: int = 4
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.recent is not None and not 0 <= self.recent <= 1:
            raise UserError(f"recent={self.recent}: a share of a head in [0, 1] would be right")
        if self.sinks < 0:
            raise UserError(f"sinks={self.sinks}: a number of tokens, 0 or more, would be right")

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Choose exactly `share` (int64 `[B, H]`) valid entries per head, bool `[B, H, n]`."""
        recent = self.recent
        if recent is None:
            recent = 0.5 if self.variant == "release" else 0.25
        window = portion(share, recent)
        if recent > 0 or self.sinks > 0:
            window = window.clamp(min=1)
        near = ((v.age < window[..., None]) & v.valid).to(torch.int8) * Scores.WINDOW
        near = torch.where((v.age == 0) & (near > 0), Scores.NEWEST, near).to(torch.int8)
        classes = torch.maximum(torch.maximum(near, protect_sinks(v, self.sinks)), scores.protect)
        ranked = rank_entries(Scores(scores.value, classes), v.valid)
        return (ranked < share[..., None]) & v.valid


@dataclass(frozen=True)
class EmaMerge(Merger):
    """Evicted entries whose nearest kept key is near enough are merged into it.

    In each head, with kept keys `k_j` and evicted `k_i`: `u_ij = cos(k_i, k_j)`, `j*(i) =
    argmax_j u_ij` (of equals the more recent). An evicted entry is merged into `j*(i)` if
    `max_j u_ij >= tau`, else dropped; `tau` is the mean of `max_j u_ij` at a head's first cut, and
    then `ema * mean + (1 - ema) * tau`:

        w_j = e / (e + sum_{i -> j} exp(u_ij)),    w_i = exp(u_ij) / (e + sum_{i -> j} exp(u_ij))
        k_j <- w_j k_j + sum_{i -> j} w_i k_i,     v_j <- w_j v_j + sum_{i -> j} w_i v_i

    A kept entry that receives nothing does not change, nor does `tau` at a cut that evicts nothing
    from a head. In float32, cast back at the end. The similarities are formed block by block of
    evicted entries, never held whole.

    Attributes:
        ema: The paper's beta; none is the variant's: 0.7 (paper), 0.5 (release).
        variant: `paper`, or `release` (the authors' code): `(k_j + sum u_ij k_i) / (1 + count)`;
            one threshold for all heads of a layer, from the mean over all their evicted entries;
            and one decision: the s-th evicted entries of all heads are merged if the mean of their
            `max_j u_ij` over heads reaches it.
    """

    name: ClassVar[str] = "ema"
    ema: float | None = None
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        """Check the range."""
        if self.ema is not None and not 0 <= self.ema <= 1:
            raise UserError(f"ema={self.ema}: a weight in [0, 1] would be right")

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Give the keys and values to store, `[B, H, n, d]` each.

        The state is `tau`, float64, and `cuts`, int64, how many it is made of: `[B, H]`, or
        `[B, 1]` where the heads share one.
        """
        kept, there = pack(keep, newest_first=True)
        evicted, real = pack(v.valid & ~keep & keep.any(-1, keepdim=True))
        similarity, near = _nearest(v.key, kept, there, evicted)
        go = self._decide(similarity.double(), real, state)
        if not bool(go.any()):
            return v.key, v.value
        if self.variant == "release":
            own, weight, norm = 1.0, similarity, go.float()
        else:
            own, weight = math.e, similarity.exp()
            norm = weight.masked_fill(~go, 0.0)
        slots = kept.shape[2]
        below = own + sum_into(norm, near, slots)
        there = there & (sum_into(go.float(), near, slots) > 0)
        merged = []
        for x in (v.key, v.value):
            total = own * take(x, kept) + sum_rows_into(x, evicted, go, near, slots, weight)
            merged.append(put(x, kept, there, total / below[..., None]))
        return merged[0], merged[1]

    def _decide(self, similarity: Tensor, real: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Update the threshold; say which evicted entries are merged, bool `[B, H, E]`."""
        ema = self.ema
        if ema is None:
            ema = 0.5 if self.variant == "release" else 0.7
        known = similarity.masked_fill(~real, 0.0)
        value, count = known.sum(2), real.sum(2)
        worth = known
        if self.variant == "release":
            value, count = value.sum(1, keepdim=True), count.sum(1, keepdim=True)
            worth = known.sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        mean = value / count.clamp(min=1)
        cuts = state.get("cuts", torch.zeros_like(count))
        before = state.get("tau", torch.zeros_like(mean))
        # In this form a mean that stays as it was leaves the threshold as it was, to the bit.
        after = torch.where(cuts > 0, before + ema * (mean - before), mean)
        tau = torch.where(count > 0, after, before)
        state["tau"], state["cuts"] = tau, cuts + (count > 0).long()
        return (worth >= tau[..., None]) & real


def _nearest(key: Tensor, kept: Tensor, there: Tensor, evicted: Tensor) -> tuple[Tensor, Tensor]:
    """Give every evicted entry its nearest kept one.

    Args:
        key: `[B, H, n, d]`.
        kept: Entries that stay, newest first, int64 `[B, H, C]`.
        there: Which of them there are, bool `[B, H, C]`.
        evicted: Entries that go, int64 `[B, H, E]`.

    Returns:
        The cosine, float32 `[B, H, E]`, and the place in `kept`, int64 `[B, H, E]`; of equally near
        ones the first.
    """
    similarity = torch.zeros(evicted.shape, device=key.device)
    near = torch.zeros_like(evicted)
    batch, heads, slots = kept.shape
    if slots == 0:
        return similarity, near
    unit = normalize(take(key, kept), dim=-1).transpose(2, 3)
    step = max(1, _BLOCK // (batch * heads * max(slots, key.shape[-1])))
    for start in range(0, evicted.shape[2], step):
        part = slice(start, start + step)
        cosine = normalize(take(key, evicted[:, :, part]), dim=-1) @ unit
        cosine = cosine.masked_fill_(~there[:, :, None], float("-inf"))
        similarity[:, :, part], near[:, :, part] = cosine.max(-1)
    return similarity, near


D2O = Policy(
    name="d2o",
    score=Accumulated(),
    allocate=InverseVariance(),
    select=ImportantRecent(),
    merge=EmaMerge(),
    summary="layers that attend evenly keep more; evicted entries join their nearest kept one",
    paper="arXiv 2406.13035, sections 4.1 and 4.2, equations 4 to 12",
    moments=("context", "question", "decode"),
    cost="time O(E C d) for E evicted and C kept entries of a head, memory O(n d)",
)
