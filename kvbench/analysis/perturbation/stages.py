"""Recording of the entries that a policy's first stage keeps.

CriticalKV (arXiv 2502.03805, Algorithm 1) first fills part of a head's budget by attention alone. In a policy without a
second stage, both stages use the same score (appendix C.4), so every policy has a stage 1: the entries that its score
ranks first.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.parts import portion, rank_entries
from kvbench.plugin import Need, Policy, Scores, Selector, View


@dataclass(frozen=True)
class RecordingSelector(Selector):
    """Wrapper of a selector that records the entries kept by stage 1.

    With `n` the head's budget and `w` its protected entries, stage 1 is the kept ones of the best
    `min(n, max(floor(alpha n), w))` entries by score.

    Attributes:
        inner: The policy's selector.
        alpha: Fraction for stage 1, for a selector without a `first_stage`.
        stage1: Bool `[B, H, n]` by layer, filled as layers are selected.
    """

    inner: Selector
    alpha: float
    stage1: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def needs(self) -> frozenset[Need]:
        """Required observations of the policy's selector."""
        return self.inner.needs

    def prepare(self, v: View, scores: Scores) -> Scores:
        """Prepare the scores as the policy does."""
        return self.inner.prepare(v, scores)

    def select(self, v: View, scores: Scores, share: Tensor) -> Tensor:
        """Select as the policy does, bool `[B, H, n]`, and record stage 1."""
        kept_mask = self.inner.select(v, scores, share)
        alpha = float(getattr(self.inner, "first_stage", self.alpha))
        protected = (v.valid & (scores.protect > 0)).sum(-1)
        stage1_size = torch.minimum(torch.maximum(portion(share, alpha), protected), share)
        self.stage1[v.layer] = (rank_entries(scores, v.valid) < stage1_size[..., None]) & kept_mask
        return kept_mask


def record_stage1(policy: Policy, alpha: float) -> tuple[Policy, dict[int, Tensor]]:
    """Return a policy that selects the same entries and records its stage 1.

    Args:
        policy: The policy; not `full`.
        alpha: Fraction for stage 1, in [0, 1].

    Returns:
        The policy, and stage 1 by layer, filled at every compression; layers without evictions are missing.
    """
    selector = RecordingSelector(policy.select, alpha)
    return dataclasses.replace(policy, select=selector), selector.stage1
