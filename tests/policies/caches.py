"""A cache that goes through several cuts, held twice.

Once as tensors (float32 or bfloat16) that the parts work on, and once as float64 lists that the
oracles work on; after every cut both must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.plugin import AttentionMass, Merger, ModelInfo, Moment, View

from . import oracles_merging as om

DIM = 6
Oracle = Callable[["Row", list[set[int]], list[np.ndarray]], None]
"""Changes a row as a merger should: what is kept of its heads, and the noise of its entries."""


@dataclass
class Head:
    """Entries of one head as the oracles hold them."""

    positions: list[int]
    keys: om.Vectors
    values: om.Vectors
    per_query_head: list[np.ndarray]  # [G][n]
    state: Any = None

    @property
    def mass(self) -> np.ndarray:
        return np.mean(self.per_query_head, axis=0)

    def keep(self, kept: set[int]) -> None:
        order = sorted(kept)
        self.positions = [self.positions[i] for i in order]
        self.keys = [self.keys[i] for i in order]
        self.values = [self.values[i] for i in order]
        self.per_query_head = [x[order] for x in self.per_query_head]


@dataclass
class Row:
    """One layer of one sequence."""

    heads: list[Head]
    state: Any = None


@dataclass
class Cache:
    """One layer of a batch, held twice; `lengths` are the tokens seen."""

    lengths: list[int]
    heads: int
    group: int
    rng: np.random.Generator
    layer: int = 0
    layers: int = 1
    dtype: torch.dtype = torch.float32
    rows: list[Row] = field(default_factory=list)
    keys: list[list[Tensor]] = field(default_factory=list)  # [B][H] of [n, d]
    values: list[list[Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    cuts: int = 0

    def __post_init__(self) -> None:
        lengths, self.lengths = self.lengths, [0] * len(self.lengths)
        empty = torch.zeros(0, DIM, dtype=self.dtype)
        for _ in lengths:
            heads = [Head([], [], [], [np.zeros(0)] * self.group) for _ in range(self.heads)]
            self.rows.append(Row(heads))
            self.keys.append([empty] * self.heads)
            self.values.append([empty] * self.heads)
        self.append(lengths)

    def append(self, counts: Sequence[int]) -> None:
        """Add random entries, and attention to all."""
        for r, count in enumerate(counts):
            for h, head in enumerate(self.rows[r].heads):
                # Keys that resemble one another more or less: some merge, some do not.
                new = [torch.from_numpy(self.rng.normal(0.5, 1, (count, DIM))) for _ in range(2)]
                key, value = (x.to(self.dtype) for x in new)
                self.keys[r][h] = torch.cat([self.keys[r][h], key])
                self.values[r][h] = torch.cat([self.values[r][h], value])
                head.keys += list(key.double().numpy())
                head.values += list(value.double().numpy())
                head.positions += range(self.lengths[r], self.lengths[r] + count)
                n = len(head.positions)
                head.per_query_head = [
                    np.float32(np.pad(x, (0, n - len(x))) + self.rng.exponential(1 + h, n)) for x in head.per_query_head
                ]
            self.lengths[r] += count

    def view(self, moment: Moment, budget: Sequence[int]) -> View:
        """Padded on the left at the first cut, on the right later, with rubbish in the padding."""
        n = max(len(head.positions) for row in self.rows for head in row.heads)
        shape = (len(self.rows), self.heads, n)
        key, value = (torch.full((*shape, DIM), math.nan, dtype=self.dtype) for _ in range(2))
        mass = torch.full((shape[0], self.heads, self.group, n), 1e9)
        position = torch.zeros(shape, dtype=torch.int64)
        valid = torch.zeros(shape, dtype=torch.bool)
        for r, row in enumerate(self.rows):
            for h, head in enumerate(row.heads):
                at = self.place(n, len(head.positions))
                key[r, h, at], value[r, h, at] = self.keys[r][h], self.values[r][h]
                mass[r, h, :, at] = torch.from_numpy(np.stack(head.per_query_head)).float()
                position[r, h, at] = torch.tensor(head.positions)
                valid[r, h, at] = True
        info = ModelInfo(
            "test",
            self.layers,
            self.heads,
            self.heads * self.group,
            DIM,
            12,
            lambda layer: torch.zeros(self.heads * self.group, DIM, 12),
        )
        return View(
            layer=self.layer,
            moment=moment,
            length=torch.tensor(self.lengths),
            col=position,
            position=position,
            valid=valid,
            key=key,
            value=value,
            obs={AttentionMass(): mass.flatten(1, 2)},
            extras={},
            model=info,
            scale=1.0,
            seed=torch.arange(len(self.rows)),
            budget=torch.tensor(list(budget)),
        )

    def place(self, n: int, count: int) -> slice:
        return slice(n - count, n) if self.cuts == 0 else slice(0, count)

    def cut(self, v: View, keep: Tensor, merger: Merger, oracle: Oracle) -> float:
        """Cut both; give the largest difference between them."""
        inputs = [x.clone() for x in (v.key, v.value)]
        key, value = merger.merge(v, keep, self.state)
        assert key.dtype == value.dtype == self.dtype
        assert all(x.shape[0] == len(self.rows) for x in self.state.values())
        assert torch.equal(torch.stack(inputs).nan_to_num(), torch.stack([v.key, v.value]).nan_to_num())
        noise, n, worst = v.noise(1), v.shape[2], 0.0
        for r, row in enumerate(self.rows):
            places = [self.place(n, len(head.positions)) for head in row.heads]
            chosen = [set(keep[r, h, at].nonzero()[:, 0].tolist()) for h, at in enumerate(places)]
            oracle(row, chosen, [noise[r, h, at].numpy() for h, at in enumerate(places)])
            for h, head in enumerate(row.heads):
                head.keep(chosen[h])
                self.keys[r][h], self.values[r][h] = (x[r, h][keep[r, h]] for x in (key, value))
                for mine, theirs in (
                    (self.keys[r][h], head.keys),
                    (self.values[r][h], head.values),
                ):
                    assert len(mine) == len(theirs) == len(chosen[h])
                    if theirs:
                        off = np.abs(mine.double().numpy() - np.stack(theirs)).max()
                        assert not math.isnan(off)
                        worst = max(worst, float(off))
        self.cuts += 1
        return worst


def ema_oracle(ema: float) -> Oracle:
    def run(row: Row, kept: list[set[int]], noise: list[np.ndarray]) -> None:
        for head, chosen in zip(row.heads, kept, strict=True):
            head.keys, head.values, head.state = om.ema_merge(head.keys, head.values, chosen, head.state, ema)

    return run


def asked_oracle(weights: str = "similarity", threshold: str = "ema", on: str = "keys") -> Oracle:
    def run(row: Row, kept: list[set[int]], noise: list[np.ndarray]) -> None:
        for head, chosen in zip(row.heads, kept, strict=True):
            state = head.state or [None, None]
            head.keys, head.values, head.state = om.merge_as_asked(
                head.keys, head.values, chosen, state, weights, threshold, on
            )

    return run


def ema_release_oracle(ema: float) -> Oracle:
    def run(row: Row, kept: list[set[int]], noise: list[np.ndarray]) -> None:
        keys, values, row.state = om.ema_merge_release(
            [h.keys for h in row.heads], [h.values for h in row.heads], kept, row.state, ema
        )
        for head, key, value in zip(row.heads, keys, values, strict=True):
            head.keys, head.values = key, value

    return run


def value_oracle(cache: Cache, m: int) -> Oracle:
    def run(row: Row, kept: list[set[int]], noise: list[np.ndarray]) -> None:
        seen = next(n for r, n in zip(cache.rows, cache.lengths, strict=True) if r is row)
        for head, chosen, u in zip(row.heads, kept, noise, strict=True):
            head.values = om.value_merge(head.values, head.mass, head.positions, chosen, row.state or 0, u, m)
        if any(len(c) < len(h.positions) for c, h in zip(kept, row.heads, strict=True)):
            row.state = seen

    return run
