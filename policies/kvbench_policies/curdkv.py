"""CurDKV: keeps the entries with the largest approximate leverage of keys and values.

Sengupta, Chaudhary, Chakraborty: Value-Guided KV Compression for LLMs via Approximated CUR Decomposition, arXiv
2509.15038, Algorithm 1: squared norms after a Gaussian projection to 20 dimensions. kvpress (`CURPress`) does not
project by default and normalises the norms in local windows: `curdkv:sketch=0:local=16`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Range, Score, Scores, View, protect_sinks
from kvbench_policies.blocks import from_blocks, in_blocks, order_of
from kvbench_policies.projections import gaussian
from kvbench_policies.ranges import check_count

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class CurLeverage(Score):
    """Product of the squared norms of an entry's projected key and value.

        s_i = l^K_i l^V_i / sum_j l^K_j l^V_j,    l^K_i = || k_i G ||^2,  l^V_i = || v_i G ||^2

    `G` is `d x sketch` with entries from N(0, 1/sketch), the same for keys and values. It is drawn per context, layer
    and head from the run's seed.

    Attributes:
        sketch: Dimensions that `G` projects to; 0 disables the projection.
        leverage: `product`, `mean` (of `l^K` and `l^V`), `key` or `value`.
        local: Window size, in entries, over which `l^K` and `l^V` are normalised to sum 1; 0 disables this.
        sinks: Number of protected first tokens.
    """

    name: ClassVar[str] = "curdkv"
    searched: ClassVar[Mapping[str, Range]] = {"sketch": Range(0, 64), "local": Range(0, 64), "sinks": Range(0, 16)}
    nonnegative: ClassVar[bool] = True
    sketch: int = 20
    leverage: Literal["product", "mean", "key", "value"] = "product"
    local: int = 0
    sinks: int = 4

    def __post_init__(self) -> None:
        check_count("sketch", self.sketch, 0, "dimensions")
        check_count("local", self.local, 0, "entries")
        check_count("sinks", self.sinks, 0)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`, summing to 1 per head."""
        key_leverage, value_leverage = (self._lengths(v, tensor) for tensor in (v.key, v.value))
        if self.leverage == "product":
            scores = key_leverage * value_leverage
        elif self.leverage == "mean":
            scores = (key_leverage + value_leverage) / 2
        else:
            scores = key_leverage if self.leverage == "key" else value_leverage
        scores = scores / scores.sum(-1, keepdim=True).clamp(min=_TINY)
        return Scores(scores, protect_sinks(v, self.sinks))

    def _lengths(self, view: View, tensor: Tensor) -> Tensor:
        """Return squared norms of projected keys or values, `[B, H, n]`; 0 where there is no entry."""
        projected = tensor.float()
        if self.sketch:
            projected = projected @ (gaussian(view, tensor.shape[-1], self.sketch) / self.sketch**0.5)
        squared_norms = projected.square().sum(-1).masked_fill(~view.valid, 0.0)
        if not self.local:
            return squared_norms
        column_order = order_of(view.valid)
        blocks = in_blocks(squared_norms, view.valid, column_order, self.local)
        return from_blocks(blocks / blocks.sum(-1, keepdim=True).clamp(min=_TINY), column_order)


CURDKV = Policy(
    name="curdkv",
    score=CurLeverage(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the entries with the largest leverage: squared norms of projected keys and values",
    paper="arXiv 2509.15038, Algorithm 1",
    moments=("context", "question", "decode"),
    cost="time O(H T d sketch), memory O(H T d)",
)
