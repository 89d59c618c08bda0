"""DART: drops visual tokens that duplicate a few pivots, in layer K.

Wen et al.: Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More, arXiv 2502.11494,
section 4, and the authors' code (https://github.com/ZichenWen1/DART), as included in other works. The pivots are the
tokens with the largest L1 norm of their keys, some visual and some text, and each pivot keeps the visual tokens that
are least similar to it. As with `fastv`, dropped tokens are evicted from the first K layers after the prefill.
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
class Dart(PrunesVisual):
    """Pivots, and for each pivot the least similar visual tokens not yet selected by an earlier one.

    Similarity is the cosine of the outputs of layer K-1 after the model's final norm; text pivots come after the last
    image. The tokens other than visual pivots are divided evenly among all pivots in prompt order, with the remainder
    to the first ones; the release drops the remainder and iterates in the order of a Python set.

    Attributes:
        layer: First layer without the dropped tokens, K.
        visual_pivots: Number of visual pivots; they are kept.
        text_pivots: Number of text pivots.
        variant: `release` (the authors' code), or `paper`, which does not specify the hidden states: the attention
            input of layer K-1 is used, with text pivots anywhere.
    """

    name: ClassVar[str] = "dart"
    layer: int = 2
    visual_pivots: int = 4
    text_pivots: int = 4
    variant: Literal["release", "paper"] = "release"

    def __post_init__(self) -> None:
        check_count("layer", self.layer, 1)
        check_count("visual_pivots", self.visual_pivots, 1)
        check_count("text_pivots", self.text_pivots, 0)

    @property
    def version(self) -> int:
        """2 for `variant=release`: the first version was `variant=paper`."""
        return 2 if self.variant == "release" else 1

    @property
    def prunes(self) -> int:
        """K."""
        return self.layer

    def prune(self, tokens: VisualTokens) -> Pruned:
        """Keep the visual pivots and the tokens least similar to each pivot."""
        assert tokens.key is not None and tokens.text_key is not None
        keep_mask = top(tokens.key.float().norm(p=1, dim=-1), min(self.visual_pivots, tokens.keep))
        features, text_features, text_keys = tokens.feature, tokens.text, tokens.text_key
        if self.variant == "release":
            assert tokens.output is not None and tokens.text_output is not None
            assert tokens.follows is not None
            features = tokens.output
            text_features, text_keys = tokens.text_output[tokens.follows], text_keys[tokens.follows]
        text_mask = top(text_keys.float().norm(p=1, dim=-1), self.text_pivots)
        similarities = similarity(torch.cat([features[keep_mask], text_features[text_mask]]), features)
        remaining = tokens.keep - int(keep_mask.sum())
        for pivot_index, closeness in enumerate(similarities):
            pivot_share = remaining // len(similarities) + (pivot_index < remaining % len(similarities))
            keep_mask |= top((-closeness).masked_fill(keep_mask, -torch.inf), pivot_share)
        return Pruned(keep_mask)


DART = Policy(
    name="dart",
    score=Dart(),
    allocate=Uniform(),
    select=TopK(),
    summary="from layer 2 on, keeps all text and the visual tokens least similar to 8 pivots",
    paper="arXiv 2502.11494, section 4; by default as the authors' code",
    cost="time O(pivots V d_model) per prompt; separate prefill",
    group="pruning",
)
