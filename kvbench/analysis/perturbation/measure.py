"""How much evicting entries changes a layer's attention output for one query, and bounds on that.

Feng, Lv, Guo, Cao, Zhou, Xie: CriticalKV: Optimizing KV Cache Eviction from an Output Perturbation
Perspective, arXiv 2502.03805: Definition 3.1 (the L1 distance), Theorem 3.2 (attention over what is
kept), Theorem 3.3 (bound theta), Assumption 3.4, Theorem 3.5 (bound theta-hat) and Theorem C.1
(theta-hat-relax). With `A` the attention of one query head over all entries, `N` in {0, 1} what is
kept, `N' <= N` what stage 1 keeps, `N'' = N - N'` and `nu_i = ||V_i W_O||_1`:

    A'      = N A / sum(N A)
    l1      = || (A - A') V W_O ||_1
    theta   = C - (2 - 1/m) sum(N A nu),           C = sum(A nu), m = sum(N A)
    theta^  = C' - (2 - 1/s) sum(N'' A nu),        C' = C - (2 - 1/s) sum(N' A nu), s = sum(N' A)
    theta~  = C' - min(nu) (2 - 1/s) sum(N'' A)

`W_O` is the query head's own slice of the output projection. Under Assumption 3.4 (`s > 0.5`)
l1 <= theta <= theta^ <= theta~; the first two hold without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 1 << 22
"""Elements of `V W_O` that are held at once, in float32."""


def value_norms(value: Tensor, weight: Tensor) -> Tensor:
    """L1 norms of the projected values, computed in blocks of tokens.

    Args:
        value: `[H, n, d]`.
        weight: The output projection, a slice per query head, `[H_q, d, d_model]`.

    Returns:
        float64 `[H_q, n]`; products in float32, `2 H_q n d d_model` flops.
    """
    heads, n, _ = value.shape
    slices = weight.float().unflatten(0, (heads, -1))
    group, width = slices.shape[1], slices.shape[-1]
    out = torch.empty(heads, group, n, dtype=torch.float64, device=value.device)
    block = max(1, _BLOCK // (heads * width))
    for start in range(0, n, block):
        part = value[:, start : start + block].float()
        for g in range(group):
            out[:, g, start : start + block] = (part @ slices[:, g]).abs_().sum(-1)
    return out.flatten(0, 1)


class Perturbed(NamedTuple):
    """What one eviction does to one query in one layer.

    Attributes:
        heads: Numbers per query head by name, float64 `[H_q]` each (see docs/analysis.md).
        change: Output with the full cache minus output with the kept entries, summed over the
            layer's heads, float64 `[d_model]`.
    """

    heads: dict[str, Tensor]
    change: Tensor


@dataclass
class Seen:
    """Everything that one query of one sequence sees in one layer with the full cache.

    Args:
        query: After RoPE, `[H_q, d]`.
        key, value: All entries, `[H, n, d]`.
        weight: The output projection, `[H_q, d, d_model]`.
        scale: Factor of the logits.
        norm: `value_norms` of the entries, float64 `[H_q, n]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    scale: float
    norm: Tensor

    def __post_init__(self) -> None:
        self._values = self.value.double()
        self._projection = self.weight.double()
        self._logits = self._logits_of(self.key)
        self.attention = torch.softmax(self._logits, -1)
        """Attention over all entries, float64 `[H_q, n]`."""
        self._sorted = self.attention.sort(-1, descending=True).values.cumsum(-1)
        self._total = (self.attention * self.norm).sum(-1)
        out = self._mix(self.attention, self._values)
        projected = self._project(out)
        self.head_output = projected.abs().sum(-1)
        """L1 norm of every head's own output, float64 `[H_q]`."""
        self.output = projected.sum(0)
        """The attention block's output without any bias, float64 `[d_model]`."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[0] // self.key.shape[0]

    def evict(self, kept: Tensor, first: Tensor | None) -> Perturbed:
        """Measure an eviction.

        Args:
            kept: What is kept, `N`, bool `[H, n]`.
            first: What stage 1 keeps, `N'`, bool `[H, n]`, part of `kept`. If it is None, whatever
                depends on it is NaN.

        Returns:
            `l1`, `mass`, `stage1_mass`, `top_mass`, `stage1`, `entries`, `bound1`, `bound2`,
            `bound3`. A head that keeps nothing has output 0.
        """
        own = kept.repeat_interleave(self.group, 0)
        left = self._softmax(self._logits, own)
        moved = self.attention - left
        change = self._project(self._mix(moved, self._values))
        heads = {"l1": change.abs().sum(-1), **self._masses(own, first)}
        # Equation 14: theta without a division by a mass that may be tiny.
        gained = ((left - 2 * self.attention * own) * self.norm).sum(-1)
        heads["bound1"] = self._total + gained
        heads |= self._stage_bounds(own, first, heads["stage1_mass"])
        return Perturbed(heads, change.sum(0))

    def replace(self, kept: Tensor, key: Tensor, value: Tensor) -> Perturbed:
        """Measure an eviction that also changes keys and values in the cache, by merging.

        Args:
            kept: What is kept, bool `[H, n]`.
            key, value: The changed keys and values, `[H, n, d]`; only rows in `kept` are read.

        Returns:
            As `evict`, but bounds and stage 1 are NaN, because they assume that entries are only
            dropped.
        """
        own = kept.repeat_interleave(self.group, 0)
        held = torch.where(kept[..., None], value.double(), 0.0)
        known = torch.where(kept[..., None], key.double(), 0.0)
        left = self._softmax(self._logits_of(known), own)
        change = self._mix(self.attention, self._values) - self._mix(left, held)
        change = self._project(change)
        heads = {"l1": change.abs().sum(-1), **self._masses(own, None)}
        heads |= {name: self._unknown() for name in ("bound1", "bound2", "bound3")}
        return Perturbed(heads, change.sum(0))

    def _masses(self, own: Tensor, first: Tensor | None) -> dict[str, Tensor]:
        found = {"mass": (self.attention * own).sum(-1), "entries": own.sum(-1).double()}
        if first is None:
            return found | {n: self._unknown() for n in ("stage1_mass", "top_mass", "stage1")}
        stage1 = first.repeat_interleave(self.group, 0) & own
        count = stage1.sum(-1)
        top = self._sorted.gather(-1, (count - 1).clamp(min=0)[:, None])[:, 0]
        return found | {
            "stage1_mass": (self.attention * stage1).sum(-1),
            "top_mass": torch.where(count > 0, top, 0.0),
            "stage1": count.double(),
        }

    def _stage_bounds(self, own: Tensor, first: Tensor | None, mass: Tensor) -> dict[str, Tensor]:
        if first is None:
            return {"bound2": self._unknown(), "bound3": self._unknown()}
        stage1 = first.repeat_interleave(self.group, 0) & own
        factor = 2 - 1 / mass
        weighed = self.attention * self.norm
        rest = self._total - factor * (weighed * stage1).sum(-1)
        second = own & ~stage1
        bound2 = rest - factor * (weighed * second).sum(-1)
        least = self.norm.amin(-1)
        bound3 = rest - least * factor * (self.attention * second).sum(-1)
        none = mass <= 0
        return {
            "bound2": bound2.masked_fill(none, torch.inf),
            "bound3": bound3.masked_fill(none, torch.inf),
        }

    def _logits_of(self, key: Tensor) -> Tensor:
        query = self.query.double().unflatten(0, (key.shape[0], -1))
        logits: Tensor = query @ key.double().transpose(-1, -2)
        return logits.flatten(0, 1) * self.scale

    @staticmethod
    def _softmax(logits: Tensor, own: Tensor) -> Tensor:
        return torch.softmax(logits.masked_fill(~own, -torch.inf), -1).nan_to_num(0.0)

    def _mix(self, weights: Tensor, values: Tensor) -> Tensor:
        out: Tensor = weights.unflatten(0, (values.shape[0], -1)) @ values
        return out.flatten(0, 1)

    def _project(self, out: Tensor) -> Tensor:
        return (out[:, None] @ self._projection)[:, 0]

    def _unknown(self) -> Tensor:
        return torch.full_like(self._total, torch.nan)
