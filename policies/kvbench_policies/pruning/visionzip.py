"""VisionZip: keeps the visual tokens that the vision tower attends to most, and merges the others.

Yang et al.: VisionZip: Longer is Better but Not Necessary in Vision Language Models, CVPR 2025, arXiv 2412.04467,
section 3.2, and the authors' code (https://github.com/dvlab-research/VisionZip). They merge before the projector; here
the language model's input tokens are merged. They also keep the class token, which LLaVA's language model does not
receive here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Pruned, VisualTokens
from kvbench_policies.pruning.common import PrunesVisual, similarity, top
from kvbench_policies.ranges import check_share


@dataclass(frozen=True)
class VisionZip(PrunesVisual):
    """Dominant tokens by the tower's attention; the others are merged into contextual tokens.

    Contextual tokens are picked at regular intervals from the non-dominant ones. Each remaining token is assigned to
    the contextual token with the most similar key (averaged over heads), and the mean of the assigned tokens is added
    to it.

    Attributes:
        contextual: Fraction of the kept tokens that are contextual; the paper keeps 10 of 64.
        variant: `release` (the authors' code), or `paper`: a contextual token becomes the mean of itself and its
            assigned tokens, and keys are concatenated over heads.
    """

    name: ClassVar[str] = "visionzip"
    reads_tower: ClassVar[bool] = True
    contextual: float = 0.15625
    variant: Literal["release", "paper"] = "release"

    def __post_init__(self) -> None:
        check_share("contextual", self.contextual)

    @property
    def version(self) -> int:
        """2 for `variant=release`: the first version was `variant=paper`."""
        return 2 if self.variant == "release" else 1

    @property
    def prunes(self) -> int:
        """0: before the language model."""
        return 0

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Keep the dominant tokens and merge the rest."""
        is_release = self.variant == "release"
        keys = tokens.head_key if is_release else tokens.patch_key
        assert tokens.salience is not None and keys is not None
        contextual_count = min(int(self.contextual * tokens.keep), tokens.keep - 1)
        keep_mask = top(tokens.salience, tokens.keep - contextual_count)
        rest_indices = (~keep_mask).nonzero().flatten()
        if not contextual_count or not len(rest_indices):
            return Pruned(keep_mask)
        target_indices = rest_indices[:: max(1, len(rest_indices) // contextual_count)][:contextual_count]
        keep_mask[target_indices] = True
        merged_indices = (~keep_mask).nonzero().flatten()
        features = tokens.feature.float().clone()
        if len(merged_indices):
            nearest_target = similarity(keys[merged_indices], keys[target_indices]).argmax(-1)
            ones = torch.ones(len(merged_indices), device=features.device)
            target_counts = torch.zeros(len(target_indices), device=features.device).index_add(0, nearest_target, ones)
            feature_sums = torch.zeros_like(features[target_indices]).index_add(
                0, nearest_target, features[merged_indices]
            )
            if is_release:
                features[target_indices] += feature_sums / target_counts.clamp(min=1)[:, None]
            else:
                features[target_indices] = (features[target_indices] + feature_sums) / (target_counts + 1)[:, None]
        return Pruned(keep_mask, features)


VISIONZIP = Policy(
    name="visionzip",
    score=VisionZip(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps all text and the visual tokens that the vision tower attends to; merges the others",
    paper="arXiv 2412.04467, section 3.2; by default as the authors' code",
    cost="one layer's attention in the vision tower per prompt; separate prefill",
    group="pruning",
)
