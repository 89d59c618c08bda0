"""PruMerge: visual tokens that the vision tower's class token attends to; the others merge in.

Shang et al.: LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal
Models, arXiv 2403.15388, section 3. The paper lets outliers of the attention decide how many tokens
stay; here the budget does. It merges before the projector; here what is merged is what the language
model is given.
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
class PruMerge(PrunesVisual):
    """The most attended tokens, each merged with its nearest pruned neighbours.

    A kept token becomes `sum_j a_j y_j / sum_j a_j` over itself and the `neighbours` pruned tokens
    with the most similar keys, where `a` is the attention and `y` what the language model is given.

    Attributes:
        neighbours: Pruned tokens that merge into each kept one.
    """

    name: ClassVar[str] = "prumerge"
    reads_tower: ClassVar[bool] = True
    neighbours: int = 32

    def __post_init__(self) -> None:
        """Check the range."""
        check_count("neighbours", self.neighbours, 0)

    @property
    def prunes(self) -> int:
        """Before the language model."""
        return 0

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Keep the most attended tokens and merge their neighbours into them."""
        assert tokens.salience is not None and tokens.patch_key is not None
        keep = top(tokens.salience, tokens.keep)
        kept, rest = keep.nonzero().flatten(), (~keep).nonzero().flatten()
        count = min(self.neighbours, len(rest))
        if not count:
            return Pruned(keep)
        near = similarity(tokens.patch_key[kept], tokens.patch_key[rest])
        group = torch.cat([kept[:, None], rest[near.topk(count, dim=-1).indices]], 1)
        weight = tokens.salience.float()[group]
        feature = tokens.feature.float().clone()
        merged = (weight[..., None] * feature[group]).sum(1) / weight.sum(1, keepdim=True)
        feature[kept] = merged
        return Pruned(keep, feature)


PRUMERGE = Policy(
    name="prumerge",
    score=PruMerge(),
    allocate=Uniform(),
    select=TopK(),
    summary="all text and the visual tokens that the vision tower attends to; others merge in",
    paper="arXiv 2403.15388, section 3, with a fixed number of tokens",
    cost="one layer's attention in the vision tower per prompt; a prefill of its own",
    group="pruning",
)
