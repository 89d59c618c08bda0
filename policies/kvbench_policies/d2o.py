"""D2O: layer shares by the variance of attention; evicted entries merge into the nearest kept one.

Wan, Wu, Zhang and others: D2O: Dynamic Discriminative Operations for Efficient Long-Context
Inference of Large Language Models, arXiv 2406.13035, section 4.2: token eviction (equations 6 to 8)
and dynamic token merging (equations 9 to 12). The shares of the layers (section 4.1) are in
`inverse_variance`.

Where the authors' released code differs from the paper, `variant=release` follows the code; each
part says how.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.parts import portion, rank_entries
from kvbench.plugin import (
    Merger,
    Policy,
    Scores,
    Selector,
    View,
    protect_sinks,
)
from kvbench_policies.h2o import Accumulated
from kvbench_policies.inverse_variance import InverseVariance
from kvbench_policies.merging import pack, put, sum_into, sum_rows_into, take
from kvbench_policies.ranges import check_count, check_share

_BLOCK = 1 << 25
"""Number of similarities held at once, in float32 (128 MiB)."""


@dataclass(frozen=True)
class ImportantRecent(Selector):
    """Part of every head's share for recent tokens, the rest for sinks and the largest scores.

    A head of share `n` keeps its last `floor(recent * n)` tokens, at least the newest, and the
    first `sinks` tokens; the largest scores fill the rest. If these tokens do not fit, the oldest
    tokens of the window give way first, then the last sinks, and the newest token last. Whatever
    the score protects is protected as well.

    Attributes:
        recent: Fraction of a head's share for recent tokens; none means the variant's value: 0.25
            (3:1, paper) or 0.5 (1:1, release).
        sinks: Number of first tokens that are protected.
        variant: `paper`, or `release` (the authors' code).
    """

    name: ClassVar[str] = "important_recent"
    recent: float | None = None
    sinks: int = 4
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.recent is not None:
            check_share("recent", self.recent)
        check_count("sinks", self.sinks, 0)

    @property
    def version(self) -> int:
        """2 with two or more sinks: of sinks that do not fit, the last now gives way first."""
        return 2 if self.sinks > 1 else 1

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
    """Evicted entries are merged into their nearest kept entry if that is near enough.

    In each head, with kept keys `k_j` and evicted keys `k_i`, let `u_ij = cos(k_i, k_j)` and
    `j*(i) = argmax_j u_ij` (ties go to the more recent entry). An evicted entry is merged into
    `j*(i)` if `max_j u_ij >= tau`, and dropped otherwise. At a head's first cut, `tau` is the mean
    of `max_j u_ij`; at later cuts it becomes `ema * mean + (1 - ema) * tau`:

        w_j = e / (e + sum_{i -> j} exp(u_ij)),    w_i = exp(u_ij) / (e + sum_{i -> j} exp(u_ij))
        k_j <- w_j k_j + sum_{i -> j} w_i k_i,     v_j <- w_j v_j + sum_{i -> j} w_i v_i

    A kept entry that receives nothing does not change, and neither does `tau` at a cut that evicts
    nothing from a head. Sums are in float32 and cast back at the end. Similarities are computed in
    blocks of evicted entries; the whole matrix is never held.

    Attributes:
        ema: The paper's beta; none means the variant's value: 0.7 (paper) or 0.5 (release).
        variant: `paper`, or `release` (the authors' code): a kept entry becomes
            `(k_j + sum u_ij k_i) / (1 + count)`; all heads of a layer share one threshold, the mean
            over all their evicted entries; and they decide together: the s-th evicted entries of
            all heads are merged if the mean of their `max_j u_ij` over heads reaches it.
    """

    name: ClassVar[str] = "ema"
    ema: float | None = None
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        """Check the range."""
        if self.ema is not None:
            check_share("ema", self.ema)

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Give the keys and values to store, `[B, H, n, d]` each.

        The state holds `tau` (float64) and `cuts` (int64), the number of cuts behind it: `[B, H]`,
        or `[B, 1]` if the heads share one threshold.
        """
        kept, in_use = pack(keep, newest_first=True)
        evicted, real = pack(v.valid & ~keep & keep.any(-1, keepdim=True))
        similarity, near = _nearest(v.key, kept, in_use, evicted)
        go = self._decide(similarity.double(), real, state)
        if not bool(go.any()):
            return v.key, v.value
        if self.variant == "release":
            kept_weight, weight, norm = 1.0, similarity, go.float()
        else:
            kept_weight, weight = math.e, similarity.exp()
            norm = weight.masked_fill(~go, 0.0)
        slots = kept.shape[2]
        below = kept_weight + sum_into(norm, near, slots)
        in_use = in_use & (sum_into(go.float(), near, slots) > 0)
        merged = []
        for x in (v.key, v.value):
            total = kept_weight * take(x, kept) + sum_rows_into(x, evicted, go, near, slots, weight)
            merged.append(put(x, kept, in_use, total / below[..., None]))
        return merged[0], merged[1]

    def _decide(self, similarity: Tensor, real: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Update the threshold and decide which evicted entries are merged, bool `[B, H, E]`."""
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
        # In this form a mean equal to the threshold leaves it unchanged to the last bit.
        after = torch.where(cuts > 0, before + ema * (mean - before), mean)
        tau = torch.where(count > 0, after, before)
        state["tau"], state["cuts"] = tau, cuts + (count > 0).long()
        return (worth >= tau[..., None]) & real


def _nearest(key: Tensor, kept: Tensor, in_use: Tensor, evicted: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nearest kept entry of every evicted entry.

    Args:
        key: `[B, H, n, d]`.
        kept: Indices of the kept entries, newest first, int64 `[B, H, C]`.
        in_use: Which of these indices are real, bool `[B, H, C]`.
        evicted: Indices of the evicted entries, int64 `[B, H, E]`.

    Returns:
        The cosine, float32 `[B, H, E]`, and the position within `kept`, int64 `[B, H, E]`; ties go
        to the first.
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
        cosine = cosine.masked_fill_(~in_use[:, :, None], float("-inf"))
        similarity[:, :, part], near[:, :, part] = cosine.max(-1)
    return similarity, near


D2O = Policy(
    name="d2o",
    score=Accumulated(),
    allocate=InverseVariance(),
    select=ImportantRecent(),
    merge=EmaMerge(),
    summary="layers that attend evenly keep more; evicted entries merge into the nearest kept one",
    paper="arXiv 2406.13035, sections 4.1 and 4.2, equations 4 to 12",
    moments=("context", "question", "decode"),
    cost="time O(E C d) for E evicted and C kept entries of a head, memory O(n d)",
)
