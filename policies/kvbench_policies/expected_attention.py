"""ExpectedAttention: keeps the entries that future queries are expected to attend to.

Devoto, Jeblick, Jégou: Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution, arXiv 2510.00636, with the defaults of the authors' library kvpress: 512 future positions, 4 sinks, and
the norm of the unprojected value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import ModelInfo, Need, Observer, Policy, Range, Score, Scores, View, protect_sinks
from kvbench.profiles.summaries import STATISTICS, WEIGHTS, SummaryNotes
from kvbench.view.rope import angles, turn, turn_back
from kvbench.view.softmax import attention_weights
from kvbench_policies.kernels.value_norm.op import value_norm
from kvbench_policies.ranges import check_count, check_finite

CONTEXT, PROFILE = "context", "profile"


@dataclass(frozen=True)
class QueryMoments(Need):
    """Mean and covariance of all queries before RoPE, float32 `[B, H_q, 1 + d, d]`.

    Row 0 is the mean, the other rows are the covariance (the sum divided by the number of queries). Both keep
    accumulating after an eviction step. They are zero if a sequence has only skipped queries.

    Attributes:
        skip: Number of first tokens whose queries are skipped.
    """

    skip: int = 4

    def observer(self, model: ModelInfo) -> Observer:
        """Return a new observer."""
        return _Moments(self.skip, model)


class _Sums(NamedTuple):
    """Count `[B]`, mean `[B, H_q, d]`, and sum of the outer products around it."""

    count: Tensor
    mean: Tensor
    outer: Tensor


class _Moments:
    """Running means and covariances, updated per forward pass (Chan, Golub, LeVeque)."""

    def __init__(self, skip: int, model: ModelInfo | None) -> None:
        self.skip, self.model = skip, model
        self._held: dict[int, _Sums] = {}

    @torch.no_grad()
    def update(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor,
        valid: Tensor,
        scale: float,
    ) -> None:
        """Observe one forward pass of one layer; see `kvbench.plugin.Observer`."""
        assert self.model is not None
        token_count = q.shape[2]
        positions = (valid.long().cumsum(-1) - 1)[:, -token_count:]
        counted_mask = valid[:, -token_count:] & (positions >= self.skip)
        cosines, sines = angles(self.model, layer, positions)
        queries = turn_back(q.float(), cosines[:, None], sines[:, None])
        queries = queries.masked_fill(~counted_mask[:, None, :, None], 0.0)
        query_counts = counted_mask.sum(-1).float()
        query_means = queries.sum(2) / query_counts.clamp(min=1)[:, None, None]
        centred = (queries - query_means[:, :, None]).masked_fill(~counted_mask[:, None, :, None], 0.0)
        new_sums = _Sums(query_counts, query_means, centred.transpose(-1, -2) @ centred)
        old_sums = self._held.get(layer)
        self._held[layer] = new_sums if old_sums is None else _combine_sums(old_sums, new_sums)

    def read(self, layer: int) -> Tensor:
        """Return mean and covariance, `[B, H_q, 1 + d, d]`."""
        query_counts, query_means, outer_sums = self._held[layer]
        covariance = outer_sums / query_counts.clamp(min=1)[:, None, None, None]
        return torch.cat([query_means[:, :, None], covariance], 2)

    def fork(self) -> Self:
        """Return an independent copy."""
        duplicate = type(self)(self.skip, self.model)
        duplicate._held = dict(self._held)
        return duplicate

    def sequence(self, row: int, tokens: int) -> Self:
        """Return the observer of one sequence; see `kvbench.plugin.Separable`."""
        duplicate = self.fork()
        duplicate._held = {
            layer_index: _Sums(*(tensor[row : row + 1] for tensor in layer_sums))
            for layer_index, layer_sums in self._held.items()
        }
        return duplicate

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join the sequences of several observers into one batch."""
        joined = cls(parts[0].skip, parts[0].model)
        for layer in parts[0]._held:
            layer_sums = zip(*(observer._held[layer] for observer in parts), strict=True)
            joined._held[layer] = _Sums(*(torch.cat(tensors) for tensors in layer_sums))
        return joined


def _combine_sums(first_sums: _Sums, second_sums: _Sums) -> _Sums:
    """Merge the sums of two sets of queries."""
    total_count = first_sums.count + second_sums.count
    second_share = (second_sums.count / total_count.clamp(min=1))[:, None, None]
    mean_shift = second_sums.mean - first_sums.mean
    shift_outer = mean_shift[..., None] * mean_shift[..., None, :]
    outer_sums = (
        first_sums.outer
        + second_sums.outer
        + shift_outer * (first_sums.count[:, None, None, None] * second_share[..., None])
    )
    return _Sums(total_count, first_sums.mean + mean_shift * second_share, outer_sums)


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """Expected attention from normally distributed queries at the next `future` positions.

    Queries before RoPE have mean `mu` and covariance `Sigma` over the text so far. With the mean `R` of the rotations
    at the next positions, `q ~ N(R mu, R Sigma R^T)`, and the expected weight of a key is `exp` of

        z_i = k_i . R mu / sqrt(d) + k_i^T R Sigma R^T k_i / (2 d)

        s_i = (mean_{g in group} softmax_i(z_i) + eps) * || v_i ||

    The softmax is over the entries after the sinks, and the model's own attention sinks, if it has any. A soft cap is
    left out: the mean of capped logits has no closed form.

    Attributes:
        future: Number of future positions over which the rotation is averaged.
        sinks: Number of protected first tokens; the statistics skip their queries.
        covariance: Whether to use the covariance term.
        norm: Norm of the value that multiplies attention: `value` (`||v_i||_2`), `output` (`||v_i W_O||_2`, mean over
            the group) or `none`.
        eps: Added to attention, so that the norm ranks entries without attention.
        statistics: Source of mean and covariance: `context`, the text so far; `profile`, the statistics that ship with
            kvbench for the model or were written by `kvbench profile queries`; or the folder, shipped name or hub id of
            measured statistics, such as those that kvpress publishes.
    """

    name: ClassVar[str] = "expected_attention"
    searched: ClassVar[Mapping[str, Range]] = {
        "future": Range(16, 2048, log=True),
        "sinks": Range(0, 16),
        "eps": Range(0.0, 0.1),
    }
    nonnegative: ClassVar[bool] = True
    future: int = 512
    sinks: int = 4
    covariance: bool = True
    norm: Literal["value", "output", "none"] = "value"
    eps: float = 0.0
    statistics: str = CONTEXT

    def __post_init__(self) -> None:
        check_count("future", self.future, 1, "positions")
        check_count("sinks", self.sinks, 0)
        check_finite("eps", self.eps, 0)

    @property
    def needs(self) -> frozenset[Need]:
        """Mean and covariance of the queries, unless measured statistics are used."""
        return frozenset({QueryMoments(self.sinks)} if self.statistics == CONTEXT else ())

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Return a copy that reads synthetic statistics (see `kvbench.plugin.Part`)."""
        if self.statistics != PROFILE:
            return self
        mean_shape = (model.layers, model.query_heads, model.head_dim)
        summary_folder = folder / "-".join(map(str, ("queries", *mean_shape)))
        if not (summary_folder / WEIGHTS).is_file():
            query_means = torch.randn(mean_shape, generator=torch.Generator().manual_seed(0))
            statistics = {
                "query_mean": query_means,
                "query_cov": torch.eye(mean_shape[-1]).expand(*mean_shape, -1),
            }
            STATISTICS.save(summary_folder, statistics, SummaryNotes())
        return self.replace(statistics=str(summary_folder))

    @property
    def _named(self) -> str | None:
        return None if self.statistics == PROFILE else self.statistics

    def fingerprint(self, model: str) -> str:
        """Return the digest of the measured statistics, part of a cell's hash.

        Raises:
            UserError: The model has no statistics.
        """
        if self.statistics == CONTEXT:
            return ""
        return STATISTICS.fingerprint(model, self._named)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the sinks."""
        rated_mask = v.valid & (v.position >= self.sinks)
        keys = v.key.float().masked_fill(~v.valid[..., None], 0.0)
        query_means, covariance = self._queries(v)
        logits = query_means[..., None, :] @ keys[:, :, None].transpose(-1, -2) * v.scale
        logits = logits[..., 0, :]
        if self.covariance:
            # One query head at a time: a whole group would hold G copies of the keys.
            for group_index in range(v.model.group):
                logit_variance = ((keys @ covariance[:, :, group_index]) * keys).sum(-1)
                logits[:, :, group_index] += logit_variance * (v.scale**2 / 2)
        logits = logits.masked_fill(~rated_mask[:, :, None], float("-inf"))
        attention = attention_weights(logits[..., None, :], v.scale)[..., 0, :].nan_to_num(0.0).mean(2)
        scores = ((attention + self.eps) * self._length(v)).masked_fill(~rated_mask, 0.0)
        return Scores(scores, protect_sinks(v, self.sinks))

    def _queries(self, view: View) -> tuple[Tensor, Tensor]:
        """Return mean `[B, H, G, d]` and covariance `[B, H, G, d, d]` of future queries."""
        moments = self._moments(view)
        future_positions = view.length[:, None] + torch.arange(self.future, device=view.length.device)
        cosines, sines = (
            rotation.mean(1)[:, None, None] for rotation in angles(view.model, view.layer, future_positions)
        )
        rotated = turn(moments, cosines, sines)
        covariance = turn(rotated[:, :, 1:].transpose(-1, -2), cosines, sines)
        head_shape = (view.model.kv_heads, view.model.group)
        return rotated[:, :, 0].unflatten(1, head_shape), covariance.unflatten(1, head_shape)

    def _moments(self, view: View) -> Tensor:
        """Return mean and covariance before RoPE, float32 `[B, H_q, 1 + d, d]`."""
        if self.statistics == CONTEXT:
            return view.obs[QueryMoments(self.sinks)]
        mean_shape = (view.model.layers, view.model.query_heads, view.model.head_dim)
        expected_shapes = {"query_mean": mean_shape, "query_cov": (*mean_shape, mean_shape[-1])}
        statistics = STATISTICS.load(view.model.name, self._named, expected_shapes)
        query_means, covariance = statistics["query_mean"][view.layer], statistics["query_cov"][view.layer]
        moments = torch.cat([query_means[:, None], covariance], 1)
        return moments.to(view.key.device).expand(len(view.length), -1, -1, -1)

    def _length(self, view: View) -> Tensor:
        """Return the norms of the values, float32 `[B, H, n]`."""
        if self.norm == "none":
            return torch.ones(view.shape, device=view.value.device)
        values = view.value.masked_fill(~view.valid[..., None], 0.0)
        if self.norm == "value":
            return values.float().norm(dim=-1)
        return value_norm(values, view.model.output_weight(view.layer), "l2")


EXPECTED_ATTENTION = Policy(
    name="expected_attention",
    score=ExpectedAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps what future queries, estimated from those so far, are expected to attend to",
    paper="arXiv 2510.00636",
    moments=("context", "question", "decode"),
    cost="time O(H_q T d^2), memory O(H_q (T + d^2) + H T d)",
)
