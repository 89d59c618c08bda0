"""DART: visual tokens that repeat a few pivots are dropped in layer K.

Wen et al.: Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters
More, arXiv 2502.11494, section 4. The pivots are the tokens with the largest L1 norm of their keys,
some visual and some text, and each pivot keeps the visual tokens that are least similar to it. As
with `fastv`, dropped tokens leave the first K layers after the prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Pruned, VisualTokens
from kvbench_policies.pruning.common import PrunesVisual, similarity, top
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class Dart(PrunesVisual):
    """Pivots, and for each the least similar visual tokens that no pivot before it has chosen.

    Similarity is the cosine of hidden states that enter the layer before the pruning. The tokens
    beside the visual pivots are divided evenly among all pivots, the first ones getting the rest.

    Attributes:
        layer: The first layer without the dropped tokens, K.
        visual_pivots: Visual tokens that are pivots; they stay.
        text_pivots: Text tokens that are pivots.
    """

    name: ClassVar[str] = "dart"
    layer: int = 2
    visual_pivots: int = 4
    text_pivots: int = 4

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_count("layer", self.layer, 1)
        check_count("visual_pivots", self.visual_pivots, 1)
        check_count("text_pivots", self.text_pivots, 0)

    @property
    def prunes(self) -> int:
        """K."""
        return self.layer

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Keep the visual pivots and what differs most from every pivot."""
        assert tokens.key is not None and tokens.text_key is not None
        keep = top(tokens.key.float().norm(p=1, dim=-1), min(self.visual_pivots, tokens.keep))
        words = top(tokens.text_key.float().norm(p=1, dim=-1), self.text_pivots)
        pivots = torch.cat([tokens.feature[keep], tokens.text[words]])
        near = similarity(pivots, tokens.feature)
        left = tokens.keep - int(keep.sum())
        for i, row in enumerate(near):
            share = left // len(near) + (i < left % len(near))
            keep |= top((-row).masked_fill(keep, -torch.inf), share)
        return Pruned(keep)


DART = Policy(
    name="dart",
    score=Dart(),
    allocate=Uniform(),
    select=TopK(),
    summary="from layer 2 on, all text and the visual tokens least similar to 8 pivots",
    paper="arXiv 2502.11494, section 4",
    cost="time O(pivots V d_model) per prompt; a prefill of its own",
    group="pruning",
)
