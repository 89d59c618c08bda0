"""Survival: how long tokens stay in use with the full cache.

Nguyen, Cohan, Ying and others: Make Each Token Count, arXiv 2605.09649, section 3.2 (figure 2) and appendix A.2 (figure
9). The query of a query head at position `p` selects past tokens: either the `K` tokens with the largest logits, or the
smallest set whose attention reaches a threshold. Token `i` is alive at horizon `L` if some query at `p >= i + L`
selects it. A query's own token counts as past.

Queries are processed in blocks during the prefill. Only the newest query that selected each token is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.engine.observers import LayerObserver
from kvbench.plugin import ModelInfo, Need, Observer
from kvbench.view.softmax import capped

_BLOCK = 1 << 21
"""Attention weights sorted per block."""

_POINTS = 32


@dataclass(frozen=True)
class InUse(Need):
    """The newest query that has selected each token: int64 `[criteria, B, H_q, n]`, -1 if none.

    Attributes:
        top: Criteria by rank: numbers of tokens with the largest logits; ties go to the more recent.
        mass: Criteria by accumulated attention, after those by rank.
    """

    top: tuple[int, ...]
    mass: tuple[float, ...]

    def observer(self, model: ModelInfo) -> Observer:
        """Return a new observer."""
        return InUseObserver(self.top, self.mass)


class InUseObserver(LayerObserver):
    """Observer of `InUse`, for sequences without padding.

    Args:
        top, mass: As in `InUse`.
    """

    def __init__(self, top: Sequence[int], mass: Sequence[float]) -> None:
        self.top, self.mass = tuple(top), tuple(mass)
        self._held: dict[int, Tensor] = {}

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
        """Observe one forward pass of one layer (see `kvbench.plugin.Observer`)."""
        batch_size, heads, query_count, _ = q.shape
        column_count = k.shape[2]
        first_position = column_count - query_count
        record_shape = (len(self.top) + len(self.mass), batch_size, heads, column_count)
        latest_query = torch.full(record_shape, -1, dtype=torch.int64, device=q.device)
        previous = self._held.get(layer)
        if previous is not None:
            latest_query[..., : previous.shape[-1]] = previous
        block_size = max(1, _BLOCK // (batch_size * heads * column_count))
        key = k.float().transpose(-1, -2)[:, :, None]
        query = q.float().unflatten(1, (k.shape[1], -1))
        for start in range(0, query_count, block_size):
            query_block = query[:, :, :, start : start + block_size]
            positions = torch.arange(
                first_position + start,
                first_position + start + query_block.shape[3],
                device=q.device,
            )
            visible_count = int(positions[-1]) + 1
            logits = (query_block @ key[..., :visible_count]).flatten(1, 2) * scale
            future = torch.arange(visible_count, device=q.device) > positions[:, None]
            ranks, selected_counts = self._ranked(logits.masked_fill(future, -torch.inf), positions, scale)
            for criterion, selected in enumerate(selected_counts):
                newest = torch.where(ranks < selected[..., None], positions[:, None], -1).amax(-2)
                latest_query[criterion, ..., :visible_count] = torch.maximum(
                    latest_query[criterion, ..., :visible_count], newest
                )
        self._held[layer] = latest_query

    def _ranked(self, logits: Tensor, positions: Tensor, scale: float) -> tuple[Tensor, list[Tensor]]:
        """Rank every token for every query `[B, H_q, m, S]`, and count the tokens that each criterion selects.

        Both kinds of criteria select the first tokens in logit order. Shares are of the attention on tokens, without
        sinks.
        """
        sorted_logits = logits.flip(-1).sort(dim=-1, descending=True, stable=True)
        token_order = logits.shape[-1] - 1 - sorted_logits.indices
        rank_values = torch.arange(logits.shape[-1], device=logits.device)
        ranks = torch.empty_like(token_order).scatter_(-1, token_order, rank_values.expand(token_order.shape))
        visible = (positions + 1).expand(logits.shape[:-1])
        selected_counts = [visible.clamp(max=top_count) for top_count in self.top]
        if self.mass:
            values = sorted_logits.values.double()
            # The cap would make the logits of later tokens finite.
            weights = torch.softmax(capped(values, scale).masked_fill(values.isneginf(), -torch.inf), -1)
            preceding_mass = weights.cumsum(-1) - weights
            selected_counts += [torch.minimum((preceding_mass < threshold).sum(-1), visible) for threshold in self.mass]
        return ranks, selected_counts

    def read(self, layer: int) -> Tensor:
        """Return the newest query that has selected each token of a layer (see `InUse`)."""
        return self._held[layer]

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Join the sequences of several observers, of equal length, into one batch."""
        joined = cls(parts[0].top, parts[0].mass)
        joined._held = {layer: torch.cat([observer._held[layer] for observer in parts], 1) for layer in parts[0]._held}
        return joined


def horizons(limit: int) -> list[int]:
    """Return the horizons of the curves: 0, 1, `limit`, and about 30 in between, spaced logarithmically."""
    points = torch.logspace(0, torch.log10(torch.tensor(float(limit))).item(), _POINTS).round()
    return sorted({0, limit, *(int(point) for point in points if point <= limit)})


@dataclass
class Survival:
    """Counts of tokens alive, and tokens that could be, over texts.

    Only tokens followed by at least `L` positions are counted at horizon `L`.

    Attributes:
        horizons: Horizons.
        alive: Tokens alive, int64 `[criteria, L, H_q, horizons]`; None before the first text.
        tokens: Tokens that could be alive at each horizon.
    """

    horizons: list[int]
    alive: Tensor | None = None
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [0] * len(self.horizons)

    def add(self, latest_queries: Sequence[Tensor]) -> None:
        """Add one text.

        Args:
            latest_queries: The record of `InUse` for each layer, int64 `[criteria, H_q, T]`.
        """
        alive_counts = torch.stack(
            [alive_at(layer_queries, self.horizons).cpu() for layer_queries in latest_queries], 1
        )
        self.alive = alive_counts if self.alive is None else self.alive + alive_counts
        length = latest_queries[0].shape[-1]
        self.tokens = [
            countable + max(0, length - horizon) for countable, horizon in zip(self.tokens, self.horizons, strict=True)
        ]

    def shares(self) -> Tensor:
        """Return the fraction of tokens alive, float64 `[criteria, L, H_q, horizons]`; NaN without tokens."""
        assert self.alive is not None
        return self.alive.double() / torch.tensor(self.tokens, dtype=torch.float64)


def alive_at(latest_query: Tensor, horizon_steps: Sequence[int]) -> Tensor:
    """Count the tokens alive at each horizon.

    Args:
        latest_query: The newest query that selected each token, -1 if none, int64 `[..., T]`.
        horizon_steps: Horizons.

    Returns:
        int64 `[..., horizons]`.
    """
    lifetimes = latest_query - torch.arange(latest_query.shape[-1], device=latest_query.device)
    lifetimes = lifetimes.masked_fill(latest_query < 0, -1)
    return torch.stack([(lifetimes >= horizon).sum(-1) for horizon in horizon_steps], -1)
