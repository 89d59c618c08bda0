"""PruMerge: keeps visual tokens that the vision tower's class token attends to and merges the others into them.

Shang et al.: LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models, arXiv 2403.15388, section
3, and the authors' code (https://github.com/42Shawn/LLaVA-PruMerge). They derive the number of kept tokens from
attention outliers; here the budget sets it. They merge before the projector; here the language model's input tokens are
merged. Their code orders the kept tokens by attention; here every token keeps its place.
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
    """The most attended tokens, each merged with its nearest neighbours.

    A kept token becomes `y_i + sum_j a_j y_j` over the `neighbours` other tokens with the most similar keys, kept or
    not, where `a` is the attention and `y` the language model's input. One extra token, in the place of the last pruned
    one, is `sum_j a_j y_j` over all tokens that are not among the most attended; a budget of one token has no extra
    token. Attention and keys are those of the tower's last layer, with one softmax over all heads.

    Attributes:
        neighbours: Number of tokens merged into each kept one.
        variant: `release` (the authors' code), or `paper`: a kept token becomes the mean, weighted by `a`, of itself
            and its nearest pruned tokens, without an extra token. Attention and keys are per head, from the layer whose
            output is used.
    """

    name: ClassVar[str] = "prumerge"
    reads_tower: ClassVar[bool] = True
    neighbours: int = 32
    variant: Literal["release", "paper"] = "release"

    def __post_init__(self) -> None:
        check_count("neighbours", self.neighbours, 0)

    @property
    def version(self) -> int:
        """2 for `variant=release`: the first version was `variant=paper`."""
        return 2 if self.variant == "release" else 1

    @property
    def prunes(self) -> int:
        """0: before the language model."""
        return 0

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Keep the most attended tokens and merge their neighbours into them."""
        if self.variant == "release":
            return self._released(tokens)
        assert tokens.salience is not None and tokens.patch_key is not None
        keep_mask = top(tokens.salience, tokens.keep)
        kept_indices, rest_indices = keep_mask.nonzero().flatten(), (~keep_mask).nonzero().flatten()
        neighbour_count = min(self.neighbours, len(rest_indices))
        if not neighbour_count:
            return Pruned(keep_mask)
        similarities = similarity(tokens.patch_key[kept_indices], tokens.patch_key[rest_indices])
        group_indices = torch.cat(
            [
                kept_indices[:, None],
                rest_indices[similarities.topk(neighbour_count, dim=-1).indices],
            ],
            1,
        )
        group_weights = tokens.salience.float()[group_indices]
        features = tokens.feature.float().clone()
        merged_features = (group_weights[..., None] * features[group_indices]).sum(1) / group_weights.sum(
            1, keepdim=True
        )
        features[kept_indices] = merged_features
        return Pruned(keep_mask, features)

    def _released(self, tokens: VisualTokens) -> Pruned:
        """Prune and merge as in the authors' code; if nothing is pruned, nothing is merged."""
        assert tokens.last_salience is not None and tokens.last_key is not None
        token_count = len(tokens.feature)
        keep_mask = top(tokens.last_salience, max(1, tokens.keep - (tokens.keep < token_count)))
        if tokens.keep == token_count:
            return Pruned(keep_mask)
        kept_indices, rest_indices = keep_mask.nonzero().flatten(), (~keep_mask).nonzero().flatten()
        similarities = similarity(tokens.last_key[kept_indices], tokens.last_key)
        similarities[torch.arange(len(kept_indices), device=similarities.device), kept_indices] = -torch.inf
        group_indices = similarities.topk(min(self.neighbours, token_count - 1), dim=-1).indices
        weighted_features = tokens.last_salience.float()[:, None] * tokens.feature.float()
        features = tokens.feature.float().clone()
        features[kept_indices] += weighted_features[group_indices].sum(1)
        if tokens.keep > 1:
            keep_mask[rest_indices[-1]] = True
            features[rest_indices[-1]] = weighted_features[rest_indices].sum(0)
        return Pruned(keep_mask, features)


PRUMERGE = Policy(
    name="prumerge",
    score=PruMerge(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps all text and the visual tokens that the vision tower attends to; merges the others into them",
    paper="arXiv 2403.15388, section 3, by default as the authors' code; a fixed number of tokens",
    cost="two layers' attention in the vision tower per prompt; separate prefill",
    group="pruning",
)
