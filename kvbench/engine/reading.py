"""Attention that reads few of the entries that a cache holds: those that a reader chooses.

Every sequence is read alone, so that its result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.engine.layer import RaggedLayer
from kvbench.engine.shared import versions
from kvbench.errors import BudgetError, BudgetRefused
from kvbench.plugin import Blocks, Policy, Reader
from kvbench.view import ModelInfo
from kvbench.view.scores import check_floating


@dataclass(frozen=True)
class Reading:
    """How the queries of one sequence read its cache.

    Attributes:
        reader: Rates the blocks.
        info: The model.
        entries: Entries that a query reads of each (layer, KV head), on average over the layers.
    """

    reader: Reader
    info: ModelInfo
    entries: int

    @property
    def block(self) -> int:
        """Entries of a block."""
        return self.reader.block(self.info)

    @property
    def total(self) -> int:
        """Entries that a query reads over all layers and KV heads."""
        return self.entries * self.info.layers * self.info.kv_heads

    def is_dense(self, index: int) -> bool:
        """Whether queries read everything in a layer, by its index among full-attention layers."""
        return index < self.reader.dense_layers

    def check(self, held: int) -> None:
        """Check that the budget is enough for a query that sees so many entries of every head.

        Raises:
            BudgetRefused: Dense layers leave less than an entry per head to one of the others.
        """
        dense = min(self.reader.dense_layers, self.info.layers)
        others, total = self.info.layers - dense, self.entries * self.info.layers
        needed = dense * held + others
        if dense and held > self.entries and needed > total:
            raise BudgetRefused(
                f"{self.reader.name}:dense_layers={self.reader.dense_layers} reads {dense * held} "
                f"entries per KV head in its dense layers and at least {others} in the others, but "
                f"the budget allows {total}; use a budget of {-(-needed // self.info.layers)} "
                "entries per head or more"
            )

    def shares(self, index: int, seen: Tensor) -> Tensor:
        """Entries that queries read of each KV head of a layer, int64 `[n]`.

        Args:
            index: Index of the layer among the full-attention layers.
            seen: Entries that each query may read, int64 `[n]`.
        """
        dense = self.reader.dense_layers
        if self.is_dense(index):
            return seen
        if not dense:
            return seen.clamp(max=self.entries)
        left = self.entries * self.info.layers - dense * seen
        others = self.info.layers - dense
        share = left // others + (left % others > index - dense)
        return torch.where(seen > self.entries, share, seen)

    def summary_bytes(self, index: int, lengths: Sequence[int], number: int) -> int:
        """Bytes of the summaries of complete blocks; dense layers need none.

        Args:
            index: Index of the layer among the full-attention layers.
            lengths: Entries that each head of the layer holds.
            number: Bytes of one number.
        """
        if not any(lengths) or self.is_dense(index):
            return 0
        return sum(n // self.block for n in lengths) * self.reader.summary(self.info) * number


def readings(policy: Policy, info: ModelInfo, entries: Sequence[int]) -> list[Reading]:
    """How sequences are read that may read so many entries each; empty without a reader."""
    return [] if policy.read is None else [Reading(policy.read, info, n) for n in entries]


def attend_few(
    query: Tensor,
    layer: RaggedLayer,
    index: int,
    first: int,
    scale: float,
    how: Sequence[Reading],
    added: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """Attention of new queries over the entries that they read.

    Args:
        query: `[B, H_q, n, d]`.
        layer: A packed layer whose heads hold all entries, those of the new queries included.
        index: Its index among the full-attention layers.
        first: Logical column of the first new query.
        scale: Factor of the logits.
        how: What the queries of every sequence read.
        added: New tokens of every sequence; one without any reads nothing.

    Returns:
        The output `[B, H_q, n, d]`, and for every sequence which of its `m` entries are read, bool
        `[H, n, m]` (no entry at all of a sequence without new tokens).

    Raises:
        BudgetError: A rating has another shape than `Reader.rate` promises.
    """
    out, masks = torch.zeros_like(query), []
    for row, one in enumerate(how):
        mask = query.new_zeros(layer.heads, query.shape[2], 0, dtype=torch.bool)
        if added[row]:
            out[row], mask = _attend_row(query[row], layer, index, row, first, scale, one)
        masks.append(mask)
    return out, masks


def _attend_row(
    query: Tensor, layer: RaggedLayer, index: int, row: int, first: int, scale: float, how: Reading
) -> tuple[Tensor, Tensor]:
    """`attend_few` for one sequence, `[H_q, n, d]`."""
    heads, (_, n, d) = layer.heads, query.shape
    here = slice(row * heads, (row + 1) * heads)
    held = layer.length[here.start]  # nothing is evicted, so that all heads hold as much
    assert layer.key is not None and layer.value is not None
    rows = torch.tensor(layer.start[here], device=layer.col.device)[:, None]
    rows = rows + torch.arange(held, device=rows.device)
    col = layer.col[rows[0]]
    column = torch.arange(first, first + n, dtype=torch.int32, device=col.device)
    seen = (col <= column[:, None]).sum(-1)  # entries that each query may read
    grouped = query.reshape(heads, -1, n, d)
    how.check(held)
    if held <= how.entries or how.is_dense(index):
        mask = (torch.arange(held, device=col.device) < seen[:, None]).expand(heads, -1, -1)
    else:
        # Copies: attention goes on with the queries, and with the keys that the layer holds.
        rating = _rated(how, index, grouped.clone(), layer.key[rows], seen)
        mask = read_entries(rating, seen, how.block, how.shares(index, seen), held)
    if n == 1:  # every head reads equally many entries, so that they can be gathered
        rows, seen_mask = rows.gather(1, mask[:, 0].nonzero()[:, 1].view(heads, -1)), None
    else:  # padding precedes every entry of an empty row; it sees everything, and is never read
        blind = (seen == 0)[:, None]
        seen_mask = (mask | blind).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1).flatten(1, 2)
        seen_mask = seen_mask[None]
    key, value = layer.key[rows], layer.value[rows]
    out = F.scaled_dot_product_attention(
        grouped.reshape(1, heads, -1, d), key[None], value[None], attn_mask=seen_mask, scale=scale
    )
    return out[0].view(-1, n, d), mask


def read_entries(rating: Tensor, seen: Tensor, block: int, entries: Tensor, held: int) -> Tensor:
    """Choose the entries that queries read.

    Args:
        rating: Ratings of the complete blocks, float32 `[H, n, K]`.
        seen: Entries that each query may read, which are the first of all, int64 `[n]`.
        block: Entries of a block.
        entries: How many of them it reads, int64 `[n]`.
        held: Entries that are held, `m`.

    Returns:
        Bool `[H, n, m]`.
    """
    last = -(-held // block)
    first = torch.arange(last, device=seen.device) * block
    length = (seen[:, None] - first).clamp(0, block)  # [n, blocks]
    newest = first // block == ((seen - 1).clamp(min=0) // block)[:, None]
    value = F.pad(rating, (0, last - rating.shape[-1]))
    value = value.masked_fill(newest, float("inf")).masked_fill(length == 0, float("-inf"))
    # Flipped, so that a stable sort leaves the newer of two equal blocks in front.
    order = last - 1 - value.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    sorted_length = length.expand_as(value).gather(-1, order)
    left = (entries[:, None] - sorted_length.cumsum(-1) + sorted_length).clamp(min=0)
    share = torch.empty_like(order).scatter_(-1, order, sorted_length.minimum(left))
    entry = torch.arange(held, device=seen.device)
    place, own = entry % block, entry // block
    end = length[:, own]
    return (place < end) & (place >= end - share[..., own])


def _rated(how: Reading, index: int, query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
    """The reader's ratings of the complete blocks."""
    heads, held, d = key.shape
    size = how.block
    complete = held // size
    shape = (heads, query.shape[2], complete)
    if not complete:
        return query.new_zeros(shape, dtype=torch.float32)
    position = torch.arange(complete * size, device=key.device).view(complete, size)
    blocks = key[:, : complete * size].view(heads, complete, size, d)
    shown = Blocks(index, query, (seen - 1).clamp(min=0), blocks, position, how.info)
    inputs = (shown.query, shown.query_position, shown.key, shown.position)
    marks = versions(*inputs)
    rating = how.reader.rate(shown)
    if versions(*inputs) != marks:
        raise BudgetError(
            f"reader {how.reader.name} changed what it was shown in place; change a copy instead"
        )
    check_floating(f"reader {how.reader.name}", rating)
    if rating.shape != shape:
        raise BudgetError(
            f"reader {how.reader.name} returned shape {list(rating.shape)}; return {list(shape)}"
        )
    return rating.float()
