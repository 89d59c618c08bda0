"""DivPrune: selects the visual tokens that differ most from one another.

Alvar et al.: DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models, CVPR 2025, arXiv 2503.02175,
Algorithm 1: a greedy solution of the max-min diversity problem with the cosine distance.
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
    """Greedy max-min diversity of the language model's visual input tokens.

    The first token is the one farthest from its nearest neighbour. Each next token is the one farthest from the
    selected tokens.
    """

    name: ClassVar[str] = "divprune"

    @property
    def prunes(self) -> int:
        """0: before the language model."""
        return 0

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Select the tokens greedily."""
        distances = 1 - similarity(tokens.feature, tokens.feature)
        keep_mask = torch.zeros(len(distances), dtype=torch.bool, device=distances.device)
        farness = distances.clone().fill_diagonal_(torch.inf).min(-1).values
        nearest = torch.full_like(farness, torch.inf)
        for _ in range(tokens.keep):
            # A tensor of one index, because a GPU waits for a scalar one.
            best_index = farness.masked_fill(keep_mask, -torch.inf).argmax(keepdim=True)
            keep_mask.index_fill_(0, best_index, True)
            # From the first selection on, only distances to selected tokens count.
            farness = nearest = torch.minimum(nearest, distances.index_select(0, best_index)[0])
        return Pruned(keep_mask)


DIVPRUNE = Policy(
    name="divprune",
    score=DivPrune(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps all text and the visual tokens that differ most from one another",
    paper="arXiv 2503.02175, Algorithm 1",
    cost="time and memory O(V^2) per prompt; separate prefill",
    group="pruning",
)
