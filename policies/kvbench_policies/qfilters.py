"""Q-Filters: keeps the keys aligned with the common direction of a head's queries.

Godey, Devoto, Zhao, Scardapane, Minervini, de la Clergerie, Sagot: Q-Filters: Leveraging QK Geometry for Efficient KV
Cache Compression, arXiv 2503.02812. `kvbench profile qfilters` estimates the filters of a model; the authors' published
filters can be used, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch

from kvbench.parts import TopK, Uniform
from kvbench.plugin import ModelInfo, Policy, Score, Scores, View, protect_window
from kvbench.profiles.summaries import FILTERS, WEIGHTS, SummaryNotes
from kvbench_policies.ranges import check_count


@dataclass(frozen=True)
class QueryDirection(Score):
    """`s_i = -k_i . f`, with the filter `f` of the KV head.

    Filters are estimated once per model. The first right singular vector of a query head's queries, after RoPE, gets
    the sign that makes its product with most of them negative; `f` is the mean over the query heads of the KV head.
    Keys aligned with most queries thus get large scores.

    The filters are those named by `filters`, else those that ship with kvbench for the model, else the user's own, as
    written by `kvbench profile qfilters`.

    Attributes:
        filters: Folder, shipped name or hub id of the filters; None finds the model's own.
        recent: Number of protected newest tokens (the authors' cache keeps 64; kvpress keeps none).
    """

    name: ClassVar[str] = "qfilters"
    filters: str | None = None
    recent: int = 0

    def __post_init__(self) -> None:
        check_count("recent", self.recent, 0)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        filter_shape = (v.model.layers, v.model.kv_heads, v.model.head_dim)
        filters = FILTERS.load(v.model.name, self.filters, {"q_filters": filter_shape})["q_filters"]
        scores = -(v.key.float() * filters[v.layer].to(v.key.device)[:, None]).sum(-1)
        return Scores(scores, protect_window(v, self.recent))

    def fingerprint(self, model: str) -> str:
        """Return the digest of the filters, part of a cell's hash.

        Raises:
            UserError: No filters were found.
        """
        return FILTERS.fingerprint(model, self.filters)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Return a copy that uses random filters (see `kvbench.plugin.Part`)."""
        filter_shape = (model.layers, model.kv_heads, model.head_dim)
        filter_folder = folder / "-".join(map(str, ("qfilters", *filter_shape)))
        if not (filter_folder / WEIGHTS).is_file():
            filters = torch.randn(filter_shape, generator=torch.Generator().manual_seed(0))
            FILTERS.save(filter_folder, {"q_filters": filters}, SummaryNotes())
        return self.replace(filters=str(filter_folder))


QFILTERS = Policy(
    name="qfilters",
    score=QueryDirection(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the keys aligned with the common direction of a head's queries, measured once per model",
    paper="arXiv 2503.02812",
    moments=("context", "question", "decode"),
    cost="time O(H T d), memory O(H T)",
)
