"""OBCache: what the attention output would lose with an entry, to second order.

Gu, Liang, Zhao, Diao: OBCache: Optimal Brain KV Cache Pruning for Efficient Long-Context LLM
Inference, arXiv 2510.07651. The three scores are derived here from the abstract's description: the
squared change of the output of a query, expanded to second order, when an entry's value, its logit
or both are set to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Need, Policy, Queries, Score, Scores, View, protect_window

_BLOCK = 1 << 22
"""Elements (query heads times queries times entries) scored at once for each sequence."""


@dataclass(frozen=True)
class OutputAware(Score):
    """Squared change of the window queries' outputs when an entry goes, to second order.

    With scaled logit `z`, attention `A` over all that a query sees and output `o_q = sum_i A v_i`:

        joint   s_i = sum_q A[q, i]^2 || v_i + z[q, i] (v_i - o_q) ||^2
        value   s_i = sum_q A[q, i]^2 || v_i ||^2
        key     s_i = sum_q (A[q, i] z[q, i])^2 || v_i - o_q ||^2

    summed over the queries of the last `window` tokens, which are protected, and over the group.
    The norms are expanded, so that no vector per (query, entry) is ever formed.

    Attributes:
        variant: `joint`, `value` or `key`: what is set to 0.
        window: Queries that observe, in tokens.
        kernel: Width of a pooling over the past in entries, odd; 1 pools nothing.
        pool: `max` or `avg`; beyond the ends lie zeros.
        group: How the query heads of a KV head are reduced: `sum`, `mean` or `max`.
    """

    name: ClassVar[str] = "obcache"
    nonnegative: ClassVar[bool] = True
    variant: Literal["joint", "value", "key"] = "joint"
    window: int = 32
    kernel: int = 1
    pool: Literal["max", "avg"] = "max"
    group: Literal["sum", "mean", "max"] = "sum"

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.window < 1:
            raise UserError(f"window={self.window}: a number of tokens, 1 or more, would be right")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"kernel={self.kernel}: an odd number, 1 or more, would be right")

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the window."""
        past = (v.age >= self.window) & v.valid
        value = v.grouped(self._lost(v), self.group).masked_fill(~past, 0.0)
        if self.kernel > 1:
            pool = max_pool1d if self.pool == "max" else avg_pool1d
            value = pool(value, self.kernel, stride=1, padding=self.kernel // 2)
        return Scores(value.masked_fill(~past, 0.0), protect_window(v, self.window))

    def _lost(self, v: View) -> Tensor:
        """Sum over the window's queries for each query head, float32 `[B, H_q, n]`."""
        batch, heads, n = v.shape
        rows = (heads, v.model.group * self.window)
        weight = v.window_attention(self.window).reshape(batch, *rows, n)
        query = v.obs[Queries(self.window)].float().reshape(batch, *rows, -1) * v.scale
        # What does not exist has no weight, but may hold what times 0 is not 0.
        value = v.value.float().masked_fill(~v.valid[..., None], 0.0)
        output = weight @ value
        lost = torch.empty(batch, heads, v.model.group, n, device=value.device)
        block = max(1, _BLOCK // (heads * rows[1]))
        for start in range(0, n, block):
            part = slice(start, start + block)
            term = self._term(query, v.key[:, :, part].float(), value[:, :, part], output)
            term = weight[..., part].square() * term
            lost[..., part] = term.unflatten(2, (v.model.group, self.window)).sum(3)
        return lost.flatten(1, 2)

    def _term(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> Tensor:
        """The factor of `A^2`, `[B, H, G * window, m]`, from scaled queries and `m` entries."""
        own = value.square().sum(-1)[:, :, None]
        if self.variant == "value":
            return own
        z = query @ key.transpose(-1, -2)
        cross = output @ value.transpose(-1, -2)
        theirs = output.square().sum(-1, keepdim=True)
        if self.variant == "key":
            return z.square() * (own - 2 * cross + theirs).clamp(min=0.0)
        # || v + z (v - o) ||^2 = || (1 + z) v - z o ||^2
        grown = 1 + z
        square = grown.square() * own - 2 * z * grown * cross + z.square() * theirs
        return square.clamp(min=0.0)


OBCACHE = Policy(
    name="obcache",
    score=OutputAware(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps what the last 32 queries' outputs would lose most without, to second order",
    paper="arXiv 2510.07651",
    cost="time O(H_q w T d), memory O(H_q w T)",
)
