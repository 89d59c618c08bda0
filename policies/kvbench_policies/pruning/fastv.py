"""FastV: drops visual tokens that the prompt's last token hardly attends to, in layer K.

Chen et al.: An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for Large Vision-Language
Models, ECCV 2024, arXiv 2403.06764, section 4.1. The paper does not compress the first K layers; here dropped tokens
are evicted from them, too, after the prefill, because every policy keeps exactly its budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Pruned, VisualTokens
from kvbench_policies.pruning.common import PrunesVisual, top
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class FastV(PrunesVisual):
    """Attention of the last token in the layer before the pruning, averaged over heads.

    Attributes:
        layer: First layer without the dropped tokens, K.
    """

    name: ClassVar[str] = "fastv"
    layer: int = 2

    def __post_init__(self) -> None:
        check_count("layer", self.layer, 1)

    @property
    def prunes(self) -> int:
        """K."""
        return self.layer

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Keep the most attended tokens."""
        assert tokens.attention is not None
        return Pruned(top(tokens.attention, tokens.keep))


FASTV = Policy(
    name="fastv",
    score=FastV(),
    allocate=Uniform(),
    select=TopK(),
    summary="from layer 2 on, keeps all text and the visual tokens that the last token attends to",
    paper="arXiv 2403.06764, section 4.1",
    cost="one attention row per prompt; separate prefill",
    group="pruning",
)
