"""How long tokens stay in use with the full cache.

Nguyen, Cohan, Ying and others: Make Each Token Count, arXiv 2605.09649, section 3.2 (figure 2) and
appendix A.2 (figure 9). The query of a query head at position `p` selects past tokens: either the
`K` tokens with the largest logits, or the smallest set whose softmax mass reaches a threshold.
Token `i` is alive at horizon `L` if some query at `p >= i + L` selects it. Here a query's own token
counts as past.

Queries are processed in blocks while the text is prefilled. For each token only the newest query
that selected it is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from kvbench.engine.observers import LayerObserver
from kvbench.plugin import ModelInfo, Need, Observer

_BLOCK = 1 << 21
"""Attention weights that are sorted at once."""

_POINTS = 32


@dataclass(frozen=True)
class InUse(Need):
    """The newest query that has selected each token: int64 `[criteria, B, H_q, n]`, -1 if none.

    Attributes:
        top: Criteria by rank: how many tokens with the largest logits; ties go to the more recent.
        mass: Criteria by mass, after those by rank.
    """

    top: tuple[int, ...]
    mass: tuple[float, ...]

    def observer(self, model: ModelInfo) -> Observer:
        """Make the observer that serves this need."""
        return InUseObserver(self.top, self.mass)


class InUseObserver(LayerObserver):
    """Records what `InUse` describes, for sequences without padding.

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
        """Process one forward of one layer (see `kvbench.plugin.Observer`)."""
        batch, heads, n, _ = q.shape
        columns = k.shape[2]
        first = columns - n
        shape = (len(self.top) + len(self.mass), batch, heads, columns)
        last = torch.full(shape, -1, dtype=torch.int64, device=q.device)
        before = self._held.get(layer)
        if before is not None:
            last[..., : before.shape[-1]] = before
        size = max(1, _BLOCK // (batch * heads * columns))
        key = k.float().transpose(-1, -2)[:, :, None]
        query = q.float().unflatten(1, (k.shape[1], -1))
        for start in range(0, n, size):
            part = query[:, :, :, start : start + size]
            at = torch.arange(first + start, first + start + part.shape[3], device=q.device)
            seen = int(at[-1]) + 1
            logits = (part @ key[..., :seen]).flatten(1, 2) * scale
            future = torch.arange(seen, device=q.device) > at[:, None]
            rank, counts = self._ranked(logits.masked_fill(future, -torch.inf), at)
            for criterion, count in enumerate(counts):
                newest = torch.where(rank < count[..., None], at[:, None], -1).amax(-2)
                last[criterion, ..., :seen] = torch.maximum(last[criterion, ..., :seen], newest)
        self._held[layer] = last

    def _ranked(self, logits: Tensor, at: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Rank every token for every query `[B, H_q, m, S]`, and count what each criterion selects.

        Both kinds of criteria select the first tokens in the order of the logits.
        """
        found = logits.flip(-1).sort(dim=-1, descending=True, stable=True)
        order = logits.shape[-1] - 1 - found.indices
        places = torch.arange(logits.shape[-1], device=logits.device)
        rank = torch.empty_like(order).scatter_(-1, order, places.expand(order.shape))
        visible = (at + 1).expand(logits.shape[:-1])
        counts = [visible.clamp(max=k) for k in self.top]
        if self.mass:
            weight = torch.softmax(found.values.double(), -1)
            before = weight.cumsum(-1) - weight
            counts += [torch.minimum((before < p).sum(-1), visible) for p in self.mass]
        return rank, counts

    def read(self, layer: int) -> Tensor:
        """The newest query that has selected each token of a layer, as `InUse` describes it."""
        return self._held[layer]

    @classmethod
    def stack(cls, parts: Sequence[Any]) -> Self:
        """Join the sequences of several observers into one batch; they must be equally long."""
        out = cls(parts[0].top, parts[0].mass)
        out._held = {i: torch.cat([p._held[i] for p in parts], 1) for i in parts[0]._held}
        return out


def horizons(most: int) -> list[int]:
    """Horizons of the curves: 0, 1, `most`, and about 30 between them, spaced logarithmically."""
    points = torch.logspace(0, torch.log10(torch.tensor(float(most))).item(), _POINTS).round()
    return sorted({0, most, *(int(p) for p in points if p <= most)})


@dataclass
class Survival:
    """Counts tokens that are alive, and tokens that could be, over texts.

    A token can be alive at horizon `L` only if `L` further positions follow it; other tokens are
    not counted at that horizon.

    Attributes:
        at: Horizons.
        alive: Tokens alive, int64 `[criteria, L, H_q, horizons]`; None before the first text.
        tokens: Tokens that could be alive at each horizon.
    """

    at: list[int]
    alive: Tensor | None = None
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [0] * len(self.at)

    def add(self, last: Sequence[Tensor]) -> None:
        """Add one text.

        Args:
            last: The record of `InUse` for each layer, int64 `[criteria, H_q, T]`.
        """
        counts = torch.stack([alive_at(one, self.at).cpu() for one in last], 1)
        self.alive = counts if self.alive is None else self.alive + counts
        length = last[0].shape[-1]
        self.tokens = [n + max(0, length - h) for n, h in zip(self.tokens, self.at, strict=True)]

    def shares(self) -> Tensor:
        """Share of tokens alive, float64 `[criteria, L, H_q, horizons]`; NaN if there is none."""
        assert self.alive is not None
        return self.alive.double() / torch.tensor(self.tokens, dtype=torch.float64)


def alive_at(last: Tensor, at: Sequence[int]) -> Tensor:
    """How many tokens are alive at each horizon.

    Args:
        last: The newest query that selected each token, -1 if none, int64 `[..., T]`.
        at: Horizons.

    Returns:
        int64 `[..., horizons]`.
    """
    life = last - torch.arange(last.shape[-1], device=last.device)
    life = life.masked_fill(last < 0, -1)
    return torch.stack([(life >= h).sum(-1) for h in at], -1)
