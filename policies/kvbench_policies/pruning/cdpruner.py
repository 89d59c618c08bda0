"""CDPruner: selects diverse visual tokens that are relevant to the text, by a determinantal point process.

Zhang et al.: Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs, arXiv
2506.10967. The paper's relevance comes from CLIP's text encoder, which checkpoints of vision-language models do not
include. Here it is the similarity of a visual token to the text tokens, both as input embeddings of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Pruned, VisualTokens
from kvbench_policies.pruning.common import PrunesVisual, similarity

_TINY = 1e-6


@dataclass(frozen=True)
class CDPruner(PrunesVisual):
    """Greedy MAP inference of a DPP with the kernel `r_i S_ij r_j`.

    `S` is the cosine similarity of visual tokens. `r` is minus the mean cosine similarity of a visual token with the
    text tokens, scaled to [0, 1] over the tokens of the prompt. The authors' code
    (https://github.com/Theia-4869/CDPruner) uses minus the similarity of CLIP's embeddings; the same sign was confirmed
    on `reference-vl` (docs/vision.md).

    Attributes:
        relevant: Prefer tokens `dissimilar` or `similar` to the text.
    """

    name: ClassVar[str] = "cdpruner"
    relevant: Literal["similar", "dissimilar"] = "dissimilar"

    @property
    def version(self) -> int:
        """2 for `relevant=dissimilar`: the first version was `relevant=similar`."""
        return 2 if self.relevant == "dissimilar" else 1

    @property
    def prunes(self) -> int:
        """0: before the language model."""
        return 0

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Select the tokens greedily."""
        relevance = similarity(tokens.feature, tokens.text).mean(-1)
        if self.relevant == "dissimilar":
            relevance = -relevance
        minimum, maximum = relevance.min(), relevance.max()
        scaled = (relevance - minimum) / (maximum - minimum).clamp(min=_TINY) + _TINY
        kernel = scaled[:, None] * similarity(tokens.feature, tokens.feature) * scaled[None]
        return Pruned(greedy_map(kernel, tokens.keep))


def greedy_map(kernel: Tensor, token_count: int) -> Tensor:
    """Greedily select items whose kernel has a large determinant.

    Chen, Zhang, Zhou: Fast Greedy MAP Inference for Determinantal Point Process, arXiv 1709.05135, Algorithm 1.

    Args:
        kernel: Positive semi-definite, `[V, V]`.
        token_count: Number of items, at most `V`.

    Returns:
        The selected items, bool `[V]`.
    """
    gains = kernel.diagonal().double()
    factor_rows = gains.new_zeros(token_count, len(kernel))
    keep_mask = torch.zeros(len(kernel), dtype=torch.bool, device=kernel.device)
    for step_index in range(token_count):
        # A tensor of one index, because a GPU waits for a scalar one.
        best_index = gains.masked_fill(keep_mask, -torch.inf).argmax(keepdim=True)
        keep_mask.index_fill_(0, best_index, True)
        # Rounding can make the gain of a linearly dependent item 0 or negative.
        pivot_root = gains.index_select(0, best_index).clamp(min=_TINY**2).sqrt()
        earlier_rows = factor_rows[:step_index]
        # Row by row, because the whole kernel in float64 would take twice the memory of the kernel itself.
        projection = earlier_rows.index_select(1, best_index)[:, 0] @ earlier_rows
        kernel_row = kernel.index_select(0, best_index)[0].double()
        factor_rows[step_index] = (kernel_row - projection) / pivot_root
        gains = gains - factor_rows[step_index].square()
    return keep_mask


CDPRUNER = Policy(
    name="cdpruner",
    score=CDPruner(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps all text and diverse visual tokens whose embeddings are unlike the text",
    paper="arXiv 2506.10967; relevance by the model's own embeddings",
    cost="time O(k^2 V) for k tokens, memory O(V^2) per prompt; separate prefill",
    group="pruning",
)
