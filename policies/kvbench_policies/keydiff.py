"""KeyDiff: keeps the keys that differ most from the mean direction of all keys.

Park, Jones, Morse, Goel, Lee, Lott: KeyDiff: Key Similarity-Based KV Cache Eviction for
Long-Context LLM Inference in Resource-Constrained Environments, arXiv 2504.15364, with the
normalised anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Score, View


@dataclass(frozen=True)
class KeyDifference(Score):
    """`s_i = -cos(k_i, mean_j k_j / ||k_j||)`, the mean over the entries that the head holds."""

    name: ClassVar[str] = "keydiff"

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]` in [-1, 1]."""
        unit_keys = normalize(v.key.float(), dim=-1).masked_fill(~v.valid[..., None], 0.0)
        # Only the direction of the anchor matters, so the sum replaces the mean.
        anchor = normalize(unit_keys.sum(2, keepdim=True), dim=-1)
        return -(unit_keys * anchor).sum(-1)


KEYDIFF = Policy(
    name="keydiff",
    score=KeyDifference(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the keys least similar to the mean key",
    paper="arXiv 2504.15364",
    moments=("context", "question", "decode", "chunked"),
    cost="time and memory O(H T d)",
)
