"""Which entries a policy's first stage keeps, recorded while the engine lets it select.

CriticalKV (arXiv 2502.03805, Algorithm 1) first keeps part of a head's share by attention alone. A
policy without a second stage is the case in which both stages use the same score (appendix C.4). So
every policy has a stage 1: the entries that its own score ranks first.
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
    """A selector that selects as another does and records what stage 1 keeps.

    With `n` the head's share and `w` its protected entries, stage 1 is those of the best
    `min(n, max(floor(alpha n), w))` entries of the score that are kept.

    Attributes:
        inner: The policy's own selector.
        alpha: Share of stage 1 for a selector without a `first_stage` of its own.
        stage1: Bool `[B, H, n]` by layer, filled as layers are selected.
    """

    inner: Selector
    alpha: float
    stage1: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def needs(self) -> frozenset[Need]:
        """The needs of the policy's own selector."""
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
    """Give a policy that selects the same entries and records its stage 1.

    Args:
        policy: The policy; not `full`.
        alpha: Share of stage 1, in [0, 1].

    Returns:
        The policy, and stage 1 by layer, filled at every compression. Nothing is selected from a
        layer that loses no entries, so it is missing there.
    """
    selector = RecordingSelector(policy.select, alpha)
    return dataclasses.replace(policy, select=selector), selector.stage1
