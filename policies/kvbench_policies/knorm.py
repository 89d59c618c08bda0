"""Key norm: keeps the keys with the smallest norm, which receive the most attention.

Devoto, Zhao, Scardapane, Minervini: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv
2406.11430. The paper does not compress the first two layers; here every layer is compressed, because every policy keeps
exactly its budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Score, View


@dataclass(frozen=True)
class KeyNorm(Score):
    """`s_i = -||k_i||_2` of the key as cached."""

    name: ClassVar[str] = "knorm"

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        key_norms: Tensor = torch.linalg.vector_norm(v.key.float(), dim=-1)
        return -key_norms


KNORM = Policy(
    name="knorm",
    score=KeyNorm(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the keys with the smallest L2 norm",
    paper="arXiv 2406.11430",
    cost="time and memory O(H T d)",
)
