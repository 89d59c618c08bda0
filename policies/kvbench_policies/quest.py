"""Quest: each query reads the pages whose keys could give it the largest logits.

Tang, Zhao, Zhu, Xiao, Kasikci, Han: Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv
2406.10774, section 3.2 and Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Blocks, ModelInfo, Policy, Reader
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class PageBound(Reader):
    """`sum_c max(q_c low_c, q_c high_c)`, an upper bound of the dot products of a query with a page's keys.

    `low` and `high` are the minimum and maximum of every channel over the keys of a page. The query heads of a KV head
    read the same pages, ranked by their largest bound. The paper has one query head per KV head and reads everything in
    the first two layers, in addition to its budget; with `dense_layers=2`, these layers read everything here, too, but
    at the expense of the other layers.

    The page of the newest entry is always read, as in the authors' kernels. They count it as a whole page of the
    budget, of which at least two are read; here only its entries count, and the rest of the budget reaches into one
    more page. In the code of the authors' accuracy experiments, this page competes like any other, and a query reads at
    least three.

    Attributes:
        page: Entries per page.
        dense_layers: Number of first layers in which a query reads all entries.
    """

    name: ClassVar[str] = "quest"
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("page", self.page, 1, "entries")

    def block(self, model: ModelInfo) -> int:
        """Return the entries per page."""
        return self.page

    def summary(self, model: ModelInfo) -> int:
        """Return the size of a page's summary: the minimum and maximum of every channel."""
        return 2 * model.head_dim

    def rate(self, v: Blocks) -> Tensor:
        """Rate the pages, float32 `[H, n, K]`."""
        page_minimum, page_maximum = (
            extremes.float().transpose(-1, -2)[:, None] for extremes in (v.key.amin(2), v.key.amax(2))
        )
        queries = v.query.float()
        page_bounds = queries.clamp(min=0) @ page_maximum + queries.clamp(max=0) @ page_minimum
        return page_bounds.amax(1)


QUEST = Policy(
    name="quest",
    score=None,
    allocate=Uniform(),
    select=TopK(),
    read=PageBound(),
    summary="holds everything; each query reads the pages whose keys could match it best",
    paper="arXiv 2406.10774, section 3.2 and Algorithm 1",
    moments=("question",),
    cost="no eviction; per query O(H_q T d / page), memory O(H T d / page); kvbench recomputes the "
    "bounds for every query, in O(H T d)",
)
