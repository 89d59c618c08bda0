"""Change of a layer's attention output for one query when entries are evicted, and its bounds.

Feng, Lv, Guo, Cao, Zhou, Xie: CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation Perspective, arXiv
2502.03805: Definition 3.1 (the L1 distance), Theorem 3.2 (attention over the kept entries), Theorem 3.3 (bound theta),
Assumption 3.4, Theorem 3.5 (bound theta-hat) and Theorem C.1 (theta-hat-relax). With `A` the attention of one query
head over all entries, `N` in {0, 1} the kept entries, `N' <= N` those kept by stage 1, `N'' = N - N'` and
`nu_i = ||V_i W_O||_1`:

    A'      = N A / sum(N A)
    l1      = || (A - A') V W_O ||_1
    theta   = C - (2 - 1/m) sum(N A nu),           C = sum(A nu), m = sum(N A)
    theta^  = C' - (2 - 1/s) sum(N'' A nu),        C' = C - (2 - 1/s) sum(N' A nu), s = sum(N' A)
    theta~  = C' - min(nu) (2 - 1/s) sum(N'' A)

`W_O` is the query head's slice of the output projection. Under Assumption 3.4 (`s > 0.5`) l1 <= theta <= theta^ <=
theta~; the first two hold without it.

An attention sink is an entry with value 0 that both stages keep: `nu = 0`, and the sums over `N` and `N'` include its
attention, so everything above holds with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.view.softmax import attention_weights, capped, sinks_of

_BLOCK = 1 << 22
"""Maximum elements of `V W_O` in memory, in float32."""


def value_norms(value: Tensor, weight: Tensor) -> Tensor:
    """Return the L1 norms of the projected values, computed in blocks of tokens.

    Args:
        value: `[H, n, d]`.
        weight: Output projection per query head, `[H_q, d, d_model]`.

    Returns:
        float64 `[H_q, n]`; products in float32, `2 H_q n d d_model` flops.
    """
    heads, length, _ = value.shape
    weight_slices = weight.float().unflatten(0, (heads, -1))
    group_size, model_width = weight_slices.shape[1], weight_slices.shape[-1]
    norms = torch.empty(heads, group_size, length, dtype=torch.float64, device=value.device)
    block_size = max(1, _BLOCK // (heads * model_width))
    for start in range(0, length, block_size):
        value_block = value[:, start : start + block_size].float()
        for group_index in range(group_size):
            norms[:, group_index, start : start + block_size] = (
                (value_block @ weight_slices[:, group_index]).abs_().sum(-1)
            )
    return norms.flatten(0, 1)


class Perturbed(NamedTuple):
    """Effect of one eviction on one query in one layer.

    Attributes:
        heads: Values per query head by name, float64 `[H_q]` each (see docs/analysis.md).
        change: Output with the full cache minus output with the kept entries, summed over the layer's heads, float64
            `[d_model]`.
    """

    heads: dict[str, Tensor]
    change: Tensor


@dataclass
class FullCacheQuery:
    """One query of one sequence in one layer, with the full cache.

    Args:
        query: After RoPE, `[H_q, d]`.
        key, value: All entries, `[H, n, d]`.
        weight: The output projection, `[H_q, d, d_model]`.
        scale: Factor of the logits, with a soft cap and sinks if the family has them.
        norm: `value_norms` of the entries, float64 `[H_q, n]`.
        useful: Useful entries, bool `[n]`, to measure the attention that the others take; None: not measured.
        gap: Logits that a near tie may lie below the largest useful one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    scale: float
    norm: Tensor
    useful: Tensor | None = None
    gap: float = 1.0

    def __post_init__(self) -> None:
        self._values = self.value.double()
        self._projection = self.weight.double()
        self._logits = self._logits_of(self.key)
        self.attention = self._weights(self._logits)
        """Attention over all entries, float64 `[H_q, n]`."""
        self.sink = torch.zeros_like(self.attention[:, 0])
        """Attention of every head's sink, float64 `[H_q]`; 0 without sinks."""
        sinks = sinks_of(self.scale)
        if sinks is not None:  # not 1 minus the rest, which is rounding error if a sink gets next to nothing
            self.sink = torch.sigmoid(sinks.to(self._logits) - self._logits.logsumexp(-1))
        self._sorted = self.attention.sort(-1, descending=True).values.cumsum(-1)
        self._total = (self.attention * self.norm).sum(-1)
        head_outputs = self._mix(self.attention, self._values)
        projected = self._project(head_outputs)
        self.head_output = projected.abs().sum(-1)
        """L1 norm of every head's output, float64 `[H_q]`."""
        self.output = projected.sum(0)
        """Output of the attention block without bias, float64 `[d_model]`."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[0] // self.key.shape[0]

    def evict(self, kept_mask: Tensor, stage1_mask: Tensor | None) -> Perturbed:
        """Measure an eviction.

        Args:
            kept_mask: Kept entries, `N`, bool `[H, n]`.
            stage1_mask: Entries kept by stage 1, `N'`, bool `[H, n]`, a subset of `kept_mask`; if None, dependent
                values are NaN.

        Returns:
            `l1`, `mass`, `stage1_mass`, `top_mass`, `stage1`, `entries`, `bound1`, `bound2`, `bound3`; with useful
            entries also those of `_dilution`. A head that keeps nothing has output 0.
        """
        query_mask = kept_mask.repeat_interleave(self.group, 0)
        kept_attention = self._weights(self._logits, query_mask)
        attention_change = self.attention - kept_attention
        change = self._project(self._mix(attention_change, self._values))
        heads = {"l1": change.abs().sum(-1), **self._masses(query_mask, stage1_mask)}
        # Equation 14: theta without division by a possibly tiny attention sum.
        bound_terms = ((kept_attention - 2 * self.attention * query_mask) * self.norm).sum(-1)
        heads["bound1"] = self._total + bound_terms
        heads |= self._stage_bounds(query_mask, stage1_mask, heads["stage1_mass"])
        heads |= self._dilution(kept_attention, query_mask)
        return Perturbed(heads, change.sum(0))

    def replace(self, kept_mask: Tensor, key: Tensor, value: Tensor) -> Perturbed:
        """Measure an eviction that also changes keys and values in the cache, by merging.

        Args:
            kept_mask: Kept entries, bool `[H, n]`.
            key, value: Changed keys and values, `[H, n, d]`; only rows in `kept_mask` are read.

        Returns:
            As for `evict`, but bounds and stage 1 are NaN, because they assume that entries are only dropped.
        """
        query_mask = kept_mask.repeat_interleave(self.group, 0)
        kept_values = torch.where(kept_mask[..., None], value.double(), 0.0)
        kept_keys = torch.where(kept_mask[..., None], key.double(), 0.0)
        kept_attention = self._weights(self._logits_of(kept_keys), query_mask)
        change = self._mix(self.attention, self._values) - self._mix(kept_attention, kept_values)
        change = self._project(change)
        heads = {"l1": change.abs().sum(-1), **self._masses(query_mask, None)}
        heads |= {bound_name: self._unknown() for bound_name in ("bound1", "bound2", "bound3")}
        heads |= self._dilution(kept_attention, None)
        return Perturbed(heads, change.sum(0))

    def _masses(self, query_mask: Tensor, stage1_mask: Tensor | None) -> dict[str, Tensor]:
        masses = {
            "mass": (self.attention * query_mask).sum(-1) + self.sink,
            "entries": query_mask.sum(-1).double(),
        }
        if stage1_mask is None:
            return masses | {measure: self._unknown() for measure in ("stage1_mass", "top_mass", "stage1")}
        query_stage1 = stage1_mask.repeat_interleave(self.group, 0) & query_mask
        stage1_count = query_stage1.sum(-1)
        top_mass = self._sorted.gather(-1, (stage1_count - 1).clamp(min=0)[:, None])[:, 0]
        return masses | {
            "stage1_mass": (self.attention * query_stage1).sum(-1) + self.sink,
            "top_mass": torch.where(stage1_count > 0, top_mass, 0.0) + self.sink,
            "stage1": stage1_count.double(),
        }

    def _dilution(self, kept_attention: Tensor, query_mask: Tensor | None) -> dict[str, Tensor]:
        """Return the attention dilution before and after an eviction (arXiv 2605.09649, section 3.1).

        Args:
            kept_attention: Attention after the eviction, float64 `[H_q, n]`.
            query_mask: Kept entries, bool `[H_q, n]`; None if merging changed them, which leaves the rates unknown.

        Returns:
            `dilution` (equation 7) with the full cache and `kept_dilution` after the eviction; `dilution_bound`, the
            lower bound of Proposition 3.1; and the retained rates `rho_useful` and `rho_distractor` of Corollary 3.2.
            Nothing if no entries are marked as useful.
        """
        if self.useful is None:
            return {}
        useful, others = self.useful, ~self.useful
        largest_useful = self._logits[:, useful].amax(-1, keepdim=True)
        near_ties = (self._logits[:, others] >= largest_useful - self.gap).sum(-1).double() / useful.sum()
        odds = math.exp(-self.gap) * near_ties
        measures = {
            "dilution": self.attention[:, others].sum(-1),
            "kept_dilution": kept_attention[:, others].sum(-1),
            "dilution_bound": odds / (1 + odds),
        }
        if query_mask is None:
            return measures | {"rho_useful": self._unknown(), "rho_distractor": self._unknown()}
        kept = self.attention * query_mask
        return measures | {
            "rho_useful": kept[:, useful].sum(-1) / self.attention[:, useful].sum(-1),
            "rho_distractor": kept[:, others].sum(-1) / self.attention[:, others].sum(-1),
        }

    def _stage_bounds(self, query_mask: Tensor, stage1_mask: Tensor | None, stage1_mass: Tensor) -> dict[str, Tensor]:
        if stage1_mask is None:
            return {"bound2": self._unknown(), "bound3": self._unknown()}
        query_stage1 = stage1_mask.repeat_interleave(self.group, 0) & query_mask
        factor = 2 - 1 / stage1_mass
        weighted_norms = self.attention * self.norm
        remainder = self._total - factor * (weighted_norms * query_stage1).sum(-1)
        query_stage2 = query_mask & ~query_stage1
        bound2 = remainder - factor * (weighted_norms * query_stage2).sum(-1)
        min_norms = self.norm.amin(-1)
        bound3 = remainder - min_norms * factor * (self.attention * query_stage2).sum(-1)
        lacks_mass = stage1_mass <= 0
        return {
            "bound2": bound2.masked_fill(lacks_mass, torch.inf),
            "bound3": bound3.masked_fill(lacks_mass, torch.inf),
        }

    def _logits_of(self, key: Tensor) -> Tensor:
        query = self.query.double().unflatten(0, (key.shape[0], -1))
        logits: Tensor = query @ key.double().transpose(-1, -2)
        return capped(logits.flatten(0, 1) * self.scale, self.scale)

    def _weights(self, logits: Tensor, query_mask: Tensor | None = None) -> Tensor:
        if query_mask is not None:
            logits = logits.masked_fill(~query_mask, -torch.inf)
        grouped_logits = logits.unflatten(0, (self.key.shape[0], -1))[:, :, None]
        return attention_weights(grouped_logits, self.scale)[:, :, 0].flatten(0, 1).nan_to_num(0.0)

    def _mix(self, weights: Tensor, values: Tensor) -> Tensor:
        mixed: Tensor = weights.unflatten(0, (values.shape[0], -1)) @ values
        return mixed.flatten(0, 1)

    def _project(self, head_outputs: Tensor) -> Tensor:
        return (head_outputs[:, None] @ self._projection)[:, 0]

    def _unknown(self) -> Tensor:
        return torch.full_like(self._total, torch.nan)
