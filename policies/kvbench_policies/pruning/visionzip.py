"""VisionZip: visual tokens with much attention in the vision tower, and merged others.

Yang et al.: VisionZip: Longer is Better but Not Necessary in Vision Language Models, CVPR 2025,
arXiv 2412.04467, section 3.2. The paper merges before the projector; here what is merged is what
the language model is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Pruned, VisualTokens
from kvbench_policies.pruning.common import PrunesVisual, similarity, top
from kvbench_policies.ranges import check_share


@dataclass(frozen=True)
class VisionZip(PrunesVisual):
    """Dominant tokens by the tower's attention; the others merge into contextual tokens.

    Contextual tokens are taken at equal steps from the tokens that are not dominant. Each of the
    rest merges into the one with the most similar key, as their mean.

    Attributes:
        contextual: Share of the kept tokens that are contextual; the paper keeps 10 of 64.
    """

    name: ClassVar[str] = "visionzip"
    reads_tower: ClassVar[bool] = True
    contextual: float = 0.15625

    def __post_init__(self) -> None:
        """Check the range."""
        check_share("contextual", self.contextual)

    @property
    def prunes(self) -> int:
        """Before the language model."""
        return 0

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Keep the dominant tokens and merge the rest."""
        assert tokens.salience is not None and tokens.patch_key is not None
        extra = min(int(self.contextual * tokens.keep), tokens.keep - 1)
        keep = top(tokens.salience, tokens.keep - extra)
        rest = (~keep).nonzero().flatten()
        if not extra or not len(rest):
            return Pruned(keep)
        target = rest[:: max(1, len(rest) // extra)][:extra]
        keep[target] = True
        others = (~keep).nonzero().flatten()
        feature = tokens.feature.float().clone()
        if len(others):
            nearest = similarity(tokens.patch_key[others], tokens.patch_key[target]).argmax(-1)
            weight = torch.ones(len(target), device=feature.device)
            weight.index_add_(0, nearest, torch.ones(len(others), device=feature.device))
            total = feature[target].index_add(0, nearest, feature[others])
            feature[target] = total / weight[:, None]
        return Pruned(keep, feature)


VISIONZIP = Policy(
    name="visionzip",
    score=VisionZip(),
    allocate=Uniform(),
    select=TopK(),
    summary="all text, visual tokens that the vision tower attends to, and means of the others",
    paper="arXiv 2412.04467, section 3.2",
    cost="one layer's attention in the vision tower per prompt; a prefill of its own",
    group="pruning",
)
