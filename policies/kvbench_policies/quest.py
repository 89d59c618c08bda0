"""Quest: every query reads the pages whose keys can give it the largest logits.

Tang, Zhao, Zhu, Xiao, Kasikci, Han: Quest: Query-Aware Sparsity for Efficient Long-Context LLM
Inference, arXiv 2406.10774, section 3.2 and Algorithm 1.
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
    """`sum_c max(q_c low_c, q_c high_c)`, a bound on the products of a query with a page's keys.

    `low` and `high` are the smallest and the largest values of every channel among the keys of a
    page. The query heads of a KV head read the same pages: the largest of their bounds counts. The
    paper has one query head per KV head, and reads everything in the first two layers on top of its
    budget; with `dense_layers=2` they do so here, and the other layers pay for it.

    The page of the newest entry is read in any case, as by the kernels of the authors' code. They
    count it as a whole page of the budget, of which at least two are read; here its entries count,
    and what it leaves is part of one more page. In the code of the authors' accuracy experiments
    this page competes like any other, and a query reads at least three.

    Attributes:
        page: Entries of a page.
        dense_layers: First layers in which a query reads all entries.
    """

    name: ClassVar[str] = "quest"
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("page", self.page, 1, "entries")

    def block(self, model: ModelInfo) -> int:
        """Entries of a page."""
        return self.page

    def summary(self, model: ModelInfo) -> int:
        """The smallest and the largest value of every channel."""
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
    summary="holds everything; each query reads the pages whose keys can match it best",
    paper="arXiv 2406.10774, section 3.2 and Algorithm 1",
    moments=("question",),
    cost="no cut; for every query O(H_q T d / page), memory O(H T d / page); kvbench computes the "
    "bounds anew for every query, in O(H T d)",
)
