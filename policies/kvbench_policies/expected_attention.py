"""ExpectedAttention: keeps what queries to come are expected to attend to.

Devoto, Jeblick, Jégou: Expected Attention: KV Cache Compression by Estimating Attention from Future
Queries Distribution, arXiv 2510.00636, with the defaults of the authors' library kvpress: 512
positions to come, 4 sinks, and the norm of the value itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import (
    ModelInfo,
    Need,
    Observer,
    Policy,
    Score,
    Scores,
    View,
    protect_sinks,
)
from kvbench.profiles.summaries import STATISTICS, WEIGHTS, SummaryNotes
from kvbench.view.rope import angles, turn, turn_back
from kvbench_policies.kernels.value_norm.op import value_norm
from kvbench_policies.ranges import check_count, check_finite

CONTEXT, PROFILE = "context", "profile"


@dataclass(frozen=True)
class QueryMoments(Need):
    """Mean and covariance of all queries before RoPE, float32 `[B, H_q, 1 + d, d]`.

    Row 0 is the mean, the other rows are the covariance (the sum divided by the number of queries).
    Both continue after a cut. They are zero if a sequence has no query that counts.

    Attributes:
        skip: Number of first tokens whose queries do not count.
    """

    skip: int = 4

    def observer(self, model: ModelInfo) -> Observer:
        """Make the observer."""
        return _Moments(self.skip, model)


class _Sums(NamedTuple):
    """Count `[B]`, mean `[B, H_q, d]`, and sum of the outer products around it."""

    count: Tensor
    mean: Tensor
    outer: Tensor


class _Moments:
    """Accumulates means and covariances forward by forward (Chan, Golub, LeVeque)."""

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
        """Observe one forward of one layer; see `kvbench.plugin.Observer`."""
        assert self.model is not None
        n = q.shape[2]
        position = (valid.long().cumsum(-1) - 1)[:, -n:]
        counts = valid[:, -n:] & (position >= self.skip)
        cos, sin = angles(self.model, layer, position)
        query = turn_back(q.float(), cos[:, None], sin[:, None])
        query = query.masked_fill(~counts[:, None, :, None], 0.0)
        count = counts.sum(-1).float()
        mean = query.sum(2) / count.clamp(min=1)[:, None, None]
        centred = (query - mean[:, :, None]).masked_fill(~counts[:, None, :, None], 0.0)
        new = _Sums(count, mean, centred.transpose(-1, -2) @ centred)
        old = self._held.get(layer)
        self._held[layer] = new if old is None else _joined(old, new)

    def read(self, layer: int) -> Tensor:
        """Return mean and covariance, `[B, H_q, 1 + d, d]`."""
        count, mean, outer = self._held[layer]
        return torch.cat([mean[:, :, None], outer / count.clamp(min=1)[:, None, None, None]], 2)

    def fork(self) -> Self:
        """Return an observer that can continue without changing this one."""
        other = type(self)(self.skip, self.model)
        other._held = dict(self._held)
        return other

    def sequence(self, row: int, tokens: int) -> Self:
        """The observer of one sequence; see `kvbench.plugin.Separable`."""
        other = self.fork()
        other._held = {i: _Sums(*(x[row : row + 1] for x in s)) for i, s in self._held.items()}
        return other

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Join the sequences of several observers in one batch."""
        out = cls(parts[0].skip, parts[0].model)
        for layer in parts[0]._held:
            held = zip(*(p._held[layer] for p in parts), strict=True)
            out._held[layer] = _Sums(*(torch.cat(x) for x in held))
        return out


def _joined(one: _Sums, two: _Sums) -> _Sums:
    """The sums of two sets of queries together."""
    count = one.count + two.count
    share = (two.count / count.clamp(min=1))[:, None, None]
    apart = two.mean - one.mean
    cross = apart[..., None] * apart[..., None, :]
    outer = one.outer + two.outer + cross * (one.count[:, None, None, None] * share[..., None])
    return _Sums(count, one.mean + apart * share, outer)


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """Attention that normally distributed queries of the next `future` positions would give.

    Queries before RoPE have mean `mu` and covariance `Sigma` over the text so far. With the mean
    `R` of the rotations at the next positions, `q ~ N(R mu, R Sigma R^T)`, and the expected weight
    of a key is `exp` of

        z_i = k_i . R mu / sqrt(d) + k_i^T R Sigma R^T k_i / (2 d)

        s_i = (mean_{g in group} softmax_i(z_i) + eps) * || v_i ||

    The softmax is over the entries behind the sinks.

    Attributes:
        future: Number of positions to come over which the rotation is averaged.
        sinks: Number of first tokens that are protected; their queries do not count either.
        covariance: Whether the covariance counts.
        norm: Length of the value by which attention is multiplied: `value` (`||v_i||_2`), `output`
            (`||v_i W_O||_2`, mean over the group) or `none`.
        eps: Added to attention, so that the length decides among entries without attention.
        statistics: Where mean and covariance come from: `context`, the text so far; `profile`, what
            ships with kvbench for the model or what `kvbench profile queries` wrote; or the folder,
            shipped name or hub id of measured ones, such as those that kvpress publishes.
    """

    name: ClassVar[str] = "expected_attention"
    nonnegative: ClassVar[bool] = True
    future: int = 512
    sinks: int = 4
    covariance: bool = True
    norm: Literal["value", "output", "none"] = "value"
    eps: float = 0.0
    statistics: str = CONTEXT

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_count("future", self.future, 1, "positions")
        check_count("sinks", self.sinks, 0)
        check_finite("eps", self.eps, 0)

    @property
    def needs(self) -> frozenset[Need]:
        """Mean and covariance of the queries, unless they were measured before."""
        return frozenset({QueryMoments(self.sinks)} if self.statistics == CONTEXT else ())

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Give a copy that reads made-up statistics (see `kvbench.plugin.Part`)."""
        if self.statistics != PROFILE:
            return self
        shape = (model.layers, model.query_heads, model.head_dim)
        path = folder / "-".join(map(str, ("queries", *shape)))
        if not (path / WEIGHTS).is_file():
            mean = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            made = {"query_mean": mean, "query_cov": torch.eye(shape[-1]).expand(*shape, -1)}
            STATISTICS.save(path, made, SummaryNotes())
        return self.replace(statistics=str(path))

    @property
    def _named(self) -> str | None:
        return None if self.statistics == PROFILE else self.statistics

    def fingerprint(self, model: str) -> str:
        """Digest of measured statistics; it joins the hash of a cell.

        Raises:
            UserError: There are none.
        """
        if self.statistics == CONTEXT:
            return ""
        return STATISTICS.fingerprint(model, self._named)

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`; 0 in the sinks."""
        rated = v.valid & (v.position >= self.sinks)
        key = v.key.float().masked_fill(~v.valid[..., None], 0.0)
        mean, covariance = self._queries(v)
        logits = mean[..., None, :] @ key[:, :, None].transpose(-1, -2) * v.scale
        logits = logits[..., 0, :]
        if self.covariance:
            for g in range(v.model.group):  # a whole group would hold G copies of the keys
                spread = ((key @ covariance[:, :, g]) * key).sum(-1)
                logits[:, :, g] += spread * (v.scale**2 / 2)
        logits = logits.masked_fill(~rated[:, :, None], float("-inf"))
        attention = logits.softmax(-1).nan_to_num(0.0).mean(2)
        value = ((attention + self.eps) * self._length(v)).masked_fill(~rated, 0.0)
        return Scores(value, protect_sinks(v, self.sinks))

    def _queries(self, v: View) -> tuple[Tensor, Tensor]:
        """Mean `[B, H, G, d]` and covariance `[B, H, G, d, d]` of queries to come."""
        moments = self._moments(v)
        coming = v.length[:, None] + torch.arange(self.future, device=v.length.device)
        cos, sin = (x.mean(1)[:, None, None] for x in angles(v.model, v.layer, coming))
        turned = turn(moments, cos, sin)
        covariance = turn(turned[:, :, 1:].transpose(-1, -2), cos, sin)
        heads = (v.model.kv_heads, v.model.group)
        return turned[:, :, 0].unflatten(1, heads), covariance.unflatten(1, heads)

    def _moments(self, v: View) -> Tensor:
        """Mean and covariance before RoPE, float32 `[B, H_q, 1 + d, d]`."""
        if self.statistics == CONTEXT:
            return v.obs[QueryMoments(self.sinks)]
        shape = (v.model.layers, v.model.query_heads, v.model.head_dim)
        shapes = {"query_mean": shape, "query_cov": (*shape, shape[-1])}
        found = STATISTICS.load(v.model.name, self._named, shapes)
        mean, covariance = found["query_mean"][v.layer], found["query_cov"][v.layer]
        joined = torch.cat([mean[:, None], covariance], 1)
        return joined.to(v.key.device).expand(len(v.length), -1, -1, -1)

    def _length(self, v: View) -> Tensor:
        """Lengths of the values, float32 `[B, H, n]`."""
        if self.norm == "none":
            return torch.ones(v.shape, device=v.value.device)
        value = v.value.masked_fill(~v.valid[..., None], 0.0)
        if self.norm == "value":
            return value.float().norm(dim=-1)
        return value_norm(value, v.model.output_weight(v.layer), "l2")


EXPECTED_ATTENTION = Policy(
    name="expected_attention",
    score=ExpectedAttention(),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps what queries to come, drawn from those so far, are expected to attend to",
    paper="arXiv 2510.00636",
    moments=("context", "question", "decode"),
    cost="time O(H_q T d^2), memory O(H_q (T + d^2) + H T d)",
)
