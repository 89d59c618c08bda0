"""DivPrune: the visual tokens that differ most from one another.

Alvar et al.: DivPrune: Diversity-based Visual Token Pruning for Large Multimodal
Models, CVPR 2025, arXiv 2503.02175, Algorithm 1: a greedy solution of the
max-min diversity problem with the cosine distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Pruned, VisualTokens
from kvbench_policies.pruning.common import PrunesVisual, similarity


@dataclass(frozen=True)
class DivPrune(PrunesVisual):
    """Greedy max-min diversity of the tokens that the language model is given.

    The first token is the one whose nearest other token is farthest away. Then the token joins
    whose distance to the chosen ones is largest.
    """

    name: ClassVar[str] = "divprune"

    @property
    def prunes(self) -> int:
        """Before the language model."""
        return 0

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Choose the tokens one by one."""
        distances = 1 - similarity(tokens.feature, tokens.feature)
        keep_mask = torch.zeros(len(distances), dtype=torch.bool, device=distances.device)
        off_diagonal = distances.clone().fill_diagonal_(torch.inf)
        nearest = off_diagonal.min(-1).values
        for _ in range(tokens.keep):
            best_index = nearest.masked_fill(keep_mask, -torch.inf).argmax()
            # From the first choice on, what counts is the distance to the chosen tokens.
            nearest = torch.minimum(nearest, distances[best_index]) if keep_mask.any() else distances[best_index]
            keep_mask[best_index] = True
        return Pruned(keep_mask)


DIVPRUNE = Policy(
    name="divprune",
    score=DivPrune(),
    allocate=Uniform(),
    select=TopK(),
    summary="all text and the visual tokens that differ most from one another",
    paper="arXiv 2503.02175, Algorithm 1",
    cost="time and memory O(V^2) per prompt; a prefill of its own",
    group="pruning",
)
