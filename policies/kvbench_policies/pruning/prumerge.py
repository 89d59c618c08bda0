"""PruMerge: visual tokens that the vision tower's class token attends to; the others merge in.

Shang et al.: LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal
Models, arXiv 2403.15388, section 3, and the authors' code
(https://github.com/42Shawn/LLaVA-PruMerge). They let outliers of the attention decide how many
tokens stay; here the budget does. They merge before the projector; here what is merged is what the
language model is given. Their code passes on the kept tokens in the order of their attention; here
every token stays in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Pruned, VisualTokens
from kvbench_policies.pruning.common import PrunesVisual, similarity, top
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class PruMerge(PrunesVisual):
    """The most attended tokens, to each of which its nearest neighbours are added.

    A kept token becomes `y_i + sum_j a_j y_j` over the `neighbours` other tokens with the most
    similar keys, kept or not, where `a` is the attention and `y` what the language model is given.
    One more token, in the place of the last pruned one, is `sum_j a_j y_j` over all that are not
    among the most attended. Attention and keys are of the last layer of the tower, with one softmax
    over all heads together. With a budget of one token there is no other.

    Attributes:
        neighbours: Tokens that are added to each kept one.
        variant: `release` (the authors' code), or `paper`: a kept token becomes the mean, weighted
            by `a`, of itself and its nearest pruned tokens, and there is no other token. Attention
            and keys are of the layer whose output is used, one head at a time.
    """

    name: ClassVar[str] = "prumerge"
    reads_tower: ClassVar[bool] = True
    neighbours: int = 32
    variant: Literal["release", "paper"] = "release"

    def __post_init__(self) -> None:
        """Check the range."""
        check_count("neighbours", self.neighbours, 0)

    @property
    def version(self) -> int:
        """2 for `variant=release`: the first version was `variant=paper`."""
        return 2 if self.variant == "release" else 1

    @property
    def prunes(self) -> int:
        """Before the language model."""
        return 0

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Keep the most attended tokens and merge their neighbours into them."""
        if self.variant == "release":
            return self._released(tokens)
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

    def _released(self, tokens: VisualTokens) -> Pruned:
        """As the authors' code does; if nothing is pruned, nothing merges."""
        assert tokens.last_salience is not None and tokens.last_key is not None
        total = len(tokens.feature)
        keep = top(tokens.last_salience, max(1, tokens.keep - (tokens.keep < total)))
        if tokens.keep == total:
            return Pruned(keep)
        kept, rest = keep.nonzero().flatten(), (~keep).nonzero().flatten()
        near = similarity(tokens.last_key[kept], tokens.last_key)
        near[torch.arange(len(kept), device=near.device), kept] = -torch.inf
        group = near.topk(min(self.neighbours, total - 1), dim=-1).indices
        weighted = tokens.last_salience.float()[:, None] * tokens.feature.float()
        feature = tokens.feature.float().clone()
        feature[kept] += weighted[group].sum(1)
        if tokens.keep > 1:
            keep[rest[-1]] = True
            feature[rest[-1]] = weighted[rest].sum(0)
        return Pruned(keep, feature)


PRUMERGE = Policy(
    name="prumerge",
    score=PruMerge(),
    allocate=Uniform(),
    select=TopK(),
    summary="all text and the visual tokens that the vision tower attends to; others merge in",
    paper="arXiv 2403.15388, section 3, by default as the authors' code; a fixed number of tokens",
    cost="two layers' attention in the vision tower per prompt; a prefill of its own",
    group="pruning",
)
