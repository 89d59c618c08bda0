"""Base of scores that use the queries of the last tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvbench.plugin import Need, Queries, Range, Score, View
from kvbench_policies.ranges import check_count, check_odd


@dataclass(frozen=True)
class WindowScore(Score):
    """Base of scores that rate the past with the queries of the last `window` tokens.

    Attributes:
        window: Number of observing queries, in tokens; these tokens are protected.
        kernel: Odd width of the pooling over the past, in entries; 1 disables pooling.
    """

    searched: ClassVar[Mapping[str, Range]] = {"window": Range(2, 128, log=True), "kernel": Range(1, 31, step=2)}
    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_odd("kernel", self.kernel)

    @property
    def needs(self) -> frozenset[Need]:
        """The last `window` queries."""
        return frozenset({Queries(self.window)})

    def past(self, view: View) -> Tensor:
        """Return a mask of the entries before the window, bool `[B, H, n]`."""
        return (view.age >= self.window) & view.valid

    def pooled(self, values: Tensor, pool: Literal["max", "avg"]) -> Tensor:
        """Pool `[B, K, n]` over neighbours, zero-padded."""
        pool_function = max_pool1d if pool == "max" else avg_pool1d
        return pool_function(values, self.kernel, stride=1, padding=self.kernel // 2)
