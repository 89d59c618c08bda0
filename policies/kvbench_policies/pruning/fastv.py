"""FastV: visual tokens that the prompt's last token hardly attends to are dropped in layer K.

Chen et al.: An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for
Large Vision-Language Models, ECCV 2024, arXiv 2403.06764, section 4.1. The paper leaves the first K
layers whole; here the entries of dropped tokens are evicted from them too, once the prompt is
prefilled, because every policy keeps exactly its budget.
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
    """The attention of the last token in the layer before the pruning, mean over heads.

    Attributes:
        layer: The first layer without the dropped tokens, K.
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
    summary="from layer 2 on, all text and the visual tokens that the last token attends to",
    paper="arXiv 2403.06764, section 4.1",
    cost="one attention row per prompt; a prefill of its own",
    group="pruning",
)
