"""D2O: layer budgets by the variance of attention; evicted entries merge into the nearest kept one.

Wan, Wu, Zhang and others: D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language
Models, arXiv 2406.13035, section 4.2: token eviction (equations 6 to 8) and dynamic token merging (equations 9 to 12).
The layer budgets (section 4.1) are in `inverse_variance`.

Where the authors' released code differs from the paper, `variant=release` follows the code; each part documents how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.parts import portion, rank_entries
from kvbench.plugin import Merger, Policy, Range, Scores, Selector, View, protect_sinks
from kvbench_policies.h2o import Accumulated
from kvbench_policies.inverse_variance import InverseVariance
from kvbench_policies.merging import pack, put, sum_into, sum_rows_into, take
from kvbench_policies.ranges import check_count, check_share

_BLOCK = 1 << 25
"""Number of similarities held at once, in float32 (128 MiB)."""


@dataclass(frozen=True)
class ImportantRecent(Selector):
    """A fixed fraction of every head's budget for recent tokens, the rest for sinks and the largest scores.

    A head with budget `n` keeps its last `floor(recent * n)` tokens, at least the newest, and the first `sinks` tokens;
    the largest scores fill the rest. If these tokens do not fit, the oldest tokens of the window are dropped first,
    then the last sinks, and the newest token last. Entries that the score protects stay protected.

    Attributes:
        recent: Fraction of a head's budget for recent tokens; None uses the variant's value: 0.25 (3:1, paper) or 0.5
            (1:1, release).
        sinks: Number of protected first tokens.
        variant: `paper`, or `release` (the authors' code).
    """

    name: ClassVar[str] = "important_recent"
    searched: ClassVar[Mapping[str, Range]] = {"sinks": Range(0, 16)}
    recent: float | None = None
    sinks: int = 4
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        if self.recent is not None:
            check_share("recent", self.recent)
        check_count("sinks", self.sinks, 0)

    @property
    def version(self) -> int:
        """2 with two or more sinks: the last sink is now dropped first if the sinks do not fit."""
        return 2 if self.sinks > 1 else 1

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Select exactly `share` (int64 `[B, H]`) valid entries per head, bool `[B, H, n]`."""
        recent_share = self.recent
        if recent_share is None:
            recent_share = 0.5 if self.variant == "release" else 0.25
        window_sizes = portion(share, recent_share)
        if recent_share > 0 or self.sinks > 0:
            window_sizes = window_sizes.clamp(min=1)
        recent_class = ((v.age < window_sizes[..., None]) & v.valid).to(torch.int8) * Scores.WINDOW
        recent_class = torch.where((v.age == 0) & (recent_class > 0), Scores.NEWEST, recent_class).to(torch.int8)
        classes = torch.maximum(torch.maximum(recent_class, protect_sinks(v, self.sinks)), scores.protect)
        ranks = rank_entries(Scores(scores.value, classes), v.valid)
        return (ranks < share[..., None]) & v.valid


@dataclass(frozen=True)
class EmaMerge(Merger):
    """Each evicted entry is merged into its nearest kept entry if they are similar enough.

    In each head, with kept keys `k_j` and evicted keys `k_i`, let `u_ij = cos(k_i, k_j)` and `j*(i) = argmax_j u_ij`
    (ties go to the more recent entry). An evicted entry is merged into `j*(i)` if `max_j u_ij >= tau`, and dropped
    otherwise. At a head's first eviction step, `tau` is the mean of `max_j u_ij`; at later ones it becomes
    `ema * mean + (1 - ema) * tau`:

        w_j = e / (e + sum_{i -> j} exp(u_ij)),    w_i = exp(u_ij) / (e + sum_{i -> j} exp(u_ij))
        k_j <- w_j k_j + sum_{i -> j} w_i k_i,     v_j <- w_j v_j + sum_{i -> j} w_i v_i

    A kept entry that receives nothing does not change, nor does `tau` if nothing is evicted from a head. Sums are in
    float32 and cast back at the end. Similarities are computed in blocks of evicted entries; the full matrix is never
    in memory.

    Attributes:
        ema: The paper's beta; None uses the variant's value: 0.7 (paper) or 0.5 (release).
        variant: `paper`, or `release` (the authors' code): a kept entry becomes `(k_j + sum u_ij k_i) / (1 + count)`;
            all heads of a layer share one threshold, the mean over all their evicted entries; and the heads decide
            together: the s-th evicted entries of all heads are merged if the mean of their `max_j u_ij` over heads
            reaches it.
        merge_threshold: `ema`, or `none`: every evicted entry is merged (the paper's table 6, without EMA threshold).
        merge_weights: `similarity`, or `uniform`: a kept entry becomes the plain mean of itself and what merges into it
            (table 8).
        merge_on: What similarities are measured on (table 7): `keys`, `values`, or `separate`: keys merge by the
            similarity of keys, and values by that of values, each with a nearest entry and a threshold of its own.
    """

    name: ClassVar[str] = "ema"
    ema: float | None = None
    variant: Literal["paper", "release"] = "paper"
    merge_threshold: Literal["ema", "none"] = "ema"
    merge_weights: Literal["similarity", "uniform"] = "similarity"
    merge_on: Literal["keys", "values", "separate"] = "keys"

    def __post_init__(self) -> None:
        if self.ema is not None:
            check_share("ema", self.ema)

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values to store, `[B, H, n, d]` each.

        The state holds `tau` (float64) and `cuts` (int64), the number of eviction steps so far: `[B, H]`, or `[B, 1]`
        if the heads share one threshold; with `merge_on=separate` also `value_tau` and `value_cuts`.
        """
        if self.merge_on == "separate":
            (key,) = self._merged([v.key], v.key, v, keep, state)
            (value,) = self._merged([v.value], v.value, v, keep, state, "value_")
            return key, value
        key, value = self._merged([v.key, v.value], v.value if self.merge_on == "values" else v.key, v, keep, state)
        return key, value

    def _merged(
        self,
        tensors: Sequence[Tensor],
        compared: Tensor,
        v: View,
        keep: Tensor,
        state: dict[str, Tensor],
        state_prefix: str = "",
    ) -> Sequence[Tensor]:
        """Return the tensors after merging by the similarity of `compared`, `[B, H, n, d]` each."""
        kept_indices, in_use = pack(keep, newest_first=True)
        evicted_indices, real_mask = pack(v.valid & ~keep & keep.any(-1, keepdim=True))
        similarity, nearest_kept = _nearest(compared, kept_indices, in_use, evicted_indices)
        merge_mask = real_mask
        if self.merge_threshold == "ema":
            merge_mask = self._decide(similarity.double(), real_mask, state, state_prefix)
        if not bool(merge_mask.any()):
            return tensors
        if self.merge_weights == "uniform":
            kept_weight, merge_weights, norm_weights = 1.0, torch.ones_like(similarity), merge_mask.float()
        elif self.variant == "release":
            kept_weight, merge_weights, norm_weights = 1.0, similarity, merge_mask.float()
        else:
            kept_weight, merge_weights = math.e, similarity.exp()
            norm_weights = merge_weights.masked_fill(~merge_mask, 0.0)
        slot_count = kept_indices.shape[2]
        denominators = kept_weight + sum_into(norm_weights, nearest_kept, slot_count)
        in_use = in_use & (sum_into(merge_mask.float(), nearest_kept, slot_count) > 0)
        merged_tensors = []
        for tensor in tensors:
            weighted_sums = kept_weight * take(tensor, kept_indices) + sum_rows_into(
                tensor, evicted_indices, merge_mask, nearest_kept, slot_count, merge_weights
            )
            merged_tensors.append(put(tensor, kept_indices, in_use, weighted_sums / denominators[..., None]))
        return merged_tensors

    def _decide(
        self, similarity: Tensor, real_mask: Tensor, state: dict[str, Tensor], state_prefix: str = ""
    ) -> Tensor:
        """Update the threshold and decide which evicted entries are merged, bool `[B, H, E]`."""
        smoothing = self.ema
        if smoothing is None:
            smoothing = 0.5 if self.variant == "release" else 0.7
        real_similarity = similarity.masked_fill(~real_mask, 0.0)
        similarity_sums, entry_counts = real_similarity.sum(2), real_mask.sum(2)
        rank_keys = real_similarity
        if self.variant == "release":
            similarity_sums, entry_counts = similarity_sums.sum(1, keepdim=True), entry_counts.sum(1, keepdim=True)
            rank_keys = real_similarity.sum(1, keepdim=True) / real_mask.sum(1, keepdim=True).clamp(min=1)
        mean_similarity = similarity_sums / entry_counts.clamp(min=1)
        tau_name, cuts_name = f"{state_prefix}tau", f"{state_prefix}cuts"
        step_counts = state.get(cuts_name, torch.zeros_like(entry_counts))
        previous_tau = state.get(tau_name, torch.zeros_like(mean_similarity))
        # In this form, a mean equal to the threshold leaves it bit-identical.
        updated_tau = torch.where(
            step_counts > 0,
            previous_tau + smoothing * (mean_similarity - previous_tau),
            mean_similarity,
        )
        threshold = torch.where(entry_counts > 0, updated_tau, previous_tau)
        state[tau_name], state[cuts_name] = threshold, step_counts + (entry_counts > 0).long()
        return (rank_keys >= threshold[..., None]) & real_mask


def _nearest(keys: Tensor, kept_indices: Tensor, in_use: Tensor, evicted_indices: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nearest kept entry of every evicted entry.

    Args:
        keys: `[B, H, n, d]`.
        kept_indices: Indices of the kept entries, newest first, int64 `[B, H, C]`.
        in_use: Valid entries of `kept_indices`, bool `[B, H, C]`.
        evicted_indices: Indices of the evicted entries, int64 `[B, H, E]`.

    Returns:
        Cosine similarity, float32 `[B, H, E]`, and index into `kept_indices`, int64 `[B, H, E]`; ties go to the first.
    """
    similarity = torch.zeros(evicted_indices.shape, device=keys.device)
    nearest_kept = torch.zeros_like(evicted_indices)
    batch_size, head_count, slot_count = kept_indices.shape
    if slot_count == 0:
        return similarity, nearest_kept
    unit_keys = normalize(take(keys, kept_indices), dim=-1).transpose(2, 3)
    block_size = max(1, _BLOCK // (batch_size * head_count * max(slot_count, keys.shape[-1])))
    for block_start in range(0, evicted_indices.shape[2], block_size):
        block_slice = slice(block_start, block_start + block_size)
        cosines = normalize(take(keys, evicted_indices[:, :, block_slice]), dim=-1) @ unit_keys
        cosines = cosines.masked_fill_(~in_use[:, :, None], float("-inf"))
        similarity[:, :, block_slice], nearest_kept[:, :, block_slice] = cosines.max(-1)
    return similarity, nearest_kept


D2O = Policy(
    name="d2o",
    score=Accumulated(),
    allocate=InverseVariance(),
    select=ImportantRecent(),
    merge=EmaMerge(),
    summary="layers with even attention keep more; evicted entries merge into the nearest kept one",
    paper="arXiv 2406.13035, sections 4.1 and 4.2, equations 4 to 12",
    moments=("context", "question", "decode"),
    cost="time O(E C d) for E evicted and C kept entries of a head, memory O(n d)",
)
