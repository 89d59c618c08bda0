"""R-KV: attention of the last queries minus how much an entry's key repeats others.

Cai, Xiao, Sun, Luo, Zhang, Wan, Li, Zhou, Chang, Gu, Dong, Anandkumar, Asi, Hu: R-KV:
Redundancy-aware KV Cache Compression for Reasoning Models, arXiv 2505.24133. lambda = 0.1 as in
the paper and the repository's README (the code's default is 0.07).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Queries, Scores, View, protect_window
from kvbench_policies.ranges import check_share
from kvbench_policies.windows import WindowScore

_SIMILAR = 0.5
"""Keys with a larger cosine count as similar."""

_BLOCK = 1 << 22
"""Number of cosines held at once for each sequence."""


@dataclass(frozen=True)
class Redundancy(WindowScore):
    """`s_i = lambda * maxpool(a_i) - (1 - lambda) * R_i` over the tokens before the window.

    The attention `a` is R-KV's own: the window's logits are reduced over the group, the softmax is
    over the past alone, and its mean over the window's queries is max-pooled over the past.

        R_j = softmax_j( mean_i c_ij ),    c_ij = cos(k_i, k_j)

    with `i` and `j` in the past, `c_ii = 0`, and for each `i` the most recent similar `j`
    (`c_ij > 0.5`) spared: that one `c_ij` is 0. Computed in blocks of rows `i`: the `T x T` matrix
    is never held, though its `2 H T^2 d` flops are spent.

    Attributes:
        redundancy: Weight of `R`, the paper's `1 - lambda`.
        window: Number of observing queries, in tokens; these tokens are protected.
        kernel: Width of the pooling in entries, odd; 1 turns pooling off.
        group: How the logits of a KV head's query heads are reduced: `max` or `mean`.
        variant: `paper`, or `release` (the authors' code): `R` is computed over the past and the
            window together, and a row `i` without a similar `j` spares the oldest entry.
    """

    name: ClassVar[str] = "rkv"
    redundancy: float = 0.9
    window: int = 8
    group: Literal["max", "mean"] = "max"
    variant: Literal["paper", "release"] = "paper"

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        check_share("redundancy", self.redundancy)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the window."""
        before_window = self.past(v)
        worth = (1 - self.redundancy) * self._attention(v, before_window)
        if self.variant == "release":
            repeats = repetition(v.key, v.valid, spare_oldest=True)
        else:
            repeats = repetition(v.key, before_window)
        worth = worth - self.redundancy * repeats
        return Scores(worth.masked_fill(~before_window, 0.0), protect_window(v, self.window))

    def _attention(self, v: View, before_window: Tensor) -> Tensor:
        """Pooled attention of the window on the past, float32 `[B, H, n]`."""
        batch, heads, n = v.shape
        query = v.obs[Queries(self.window)].float() * v.scale
        query = query.reshape(batch, heads, v.model.group * self.window, -1)
        logits = (query @ v.key.float().transpose(-1, -2)).view(batch, -1, self.window, n)
        # If there is a past the window is full, and all of its queries see all of the past.
        logits = v.grouped(logits, self.group).masked_fill(
            ~before_window[:, :, None], float("-inf")
        )
        attention = torch.softmax(logits, -1).nan_to_num(0.0).mean(2)
        return self.pooled(attention, "max")


def repetition(key: Tensor, among: Tensor, spare_oldest: bool = False) -> Tensor:
    """How much every key repeats the others: `R` of `Redundancy`.

    Args:
        key: Keys, `[B, H, n, d]`, in the order of their tokens.
        among: Which entries are compared, bool `[B, H, n]`; the others are ignored.
        spare_oldest: Whether a row without a similar key spares the oldest entry instead of none.

    Returns:
        float32 `[B, H, n]`, summing to 1 over the compared entries of a head; 0 elsewhere.
    """
    _, heads, n = among.shape
    unit = normalize(key.float(), dim=-1).masked_fill(~among[..., None], 0.0)
    column = torch.arange(n, device=key.device)
    default = among.int().argmax(-1)[..., None, None] if spare_oldest else -1
    total = torch.zeros(among.shape, device=key.device)
    block = max(1, _BLOCK // (heads * n))
    for start in range(0, n, block):
        row = column[start : start + block, None]
        cosine = unit[:, :, start : start + block] @ unit.transpose(-1, -2)
        cosine = cosine.masked_fill_(row == column, 0.0)
        spared = torch.where(cosine > _SIMILAR, column, default).amax(-1, keepdim=True)
        total += cosine.masked_fill_(column == spared, 0.0).sum(2)
    mean = total / among.sum(-1, keepdim=True).clamp(min=1)
    return torch.softmax(mean.masked_fill(~among, float("-inf")), -1).nan_to_num(0.0)


RKV = Policy(
    name="rkv",
    score=Redundancy(),
    allocate=Uniform(),
    select=TopK(),
    summary="attention of the last 8 queries minus how much an entry's key repeats the others",
    paper="arXiv 2505.24133",
    buffer=128,
    moments=("decode",),
    cost="time O(H T^2 d), memory O(H_q w T) and a block of T x T",
)
