"""Sparse attention over the cached entries that a reader selects.

Every sequence is processed alone, so that its result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.engine.dense import materialised_attention
from kvbench.engine.integrity import versions
from kvbench.engine.layer import RaggedLayer
from kvbench.errors import BudgetError, BudgetRefused
from kvbench.plugin import Blocks, Policy, Reader
from kvbench.view import ModelInfo
from kvbench.view.shown import check_floating
from kvbench.view.softmax import is_plain


@dataclass(frozen=True)
class Reading:
    """How the queries of one sequence read its cache.

    Attributes:
        reader: Rates the blocks.
        entries: Entries a query reads per (layer, KV head), averaged over the layers.
    """

    reader: Reader
    info: ModelInfo
    entries: int

    @property
    def block(self) -> int:
        """Return the block size in entries."""
        return self.reader.block(self.info)

    @property
    def total(self) -> int:
        """Return the entries that a query reads over all layers and KV heads."""
        return self.entries * self.info.layers * self.info.kv_heads

    def is_dense(self, layer_index: int) -> bool:
        """Return whether queries read everything in a layer, given its index among full-attention layers."""
        return layer_index < self.reader.dense_layers

    def check(self, count: int) -> None:
        """Check that the budget suffices for a query that sees `count` entries per head.

        Raises:
            BudgetRefused: The dense layers leave another layer less than one entry per head.
        """
        dense = min(self.reader.dense_layers, self.info.layers)
        sparse, limit = self.info.layers - dense, self.entries * self.info.layers
        required = dense * count + sparse
        if dense and count > self.entries and required > limit:
            raise BudgetRefused(
                f"{self.reader.name}:dense_layers={self.reader.dense_layers} reads {dense * count} entries per KV head "
                f"in its dense layers and at least {sparse} in the others, but the budget allows {limit}; "
                f"use a budget of {-(-required // self.info.layers)} entries per head or more"
            )

    def shares(self, layer_index: int, visible_counts: Tensor) -> Tensor:
        """Return the entries that queries read per KV head of a layer, int64 `[n]`.

        Args:
            layer_index: Index of the layer among the full-attention layers.
            visible_counts: Entries that each query may read, int64 `[n]`.
        """
        dense_layers = self.reader.dense_layers
        if self.is_dense(layer_index):
            return visible_counts
        if not dense_layers:
            return visible_counts.clamp(max=self.entries)
        remaining = self.entries * self.info.layers - dense_layers * visible_counts
        sparse_layers = self.info.layers - dense_layers
        layer_budgets = remaining // sparse_layers + (remaining % sparse_layers > layer_index - dense_layers)
        return torch.where(visible_counts > self.entries, layer_budgets, visible_counts)

    def summary_bytes(self, layer_index: int, lengths: Sequence[int], number_bytes: int) -> int:
        """Return the bytes of the summaries of complete blocks; dense layers need none.

        Args:
            layer_index: Index of the layer among the full-attention layers.
            lengths: Entries held by each head of the layer.
            number_bytes: Bytes per number.
        """
        if not any(lengths) or self.is_dense(layer_index):
            return 0
        return sum(entry_count // self.block for entry_count in lengths) * self.reader.summary(self.info) * number_bytes


def readings(policy: Policy, info: ModelInfo, entry_counts: Sequence[int]) -> list[Reading]:
    """Return the readings of sequences with these numbers of readable entries; empty without a reader."""
    return [] if policy.read is None else [Reading(policy.read, info, entry_count) for entry_count in entry_counts]


def attend_few(
    query: Tensor,
    layer: RaggedLayer,
    layer_index: int,
    first_column: int,
    scale: float,
    row_readings: Sequence[Reading],
    token_counts: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """Compute attention of new queries over the entries that they read.

    Args:
        query: `[B, H_q, n, d]`.
        layer: A packed layer whose heads hold all entries, including those of the new queries.
        layer_index: Its index among the full-attention layers.
        first_column: Logical column of the first new query.
        scale: Scaling factor of the logits.
        row_readings: What the queries of every sequence read.
        token_counts: New tokens per sequence; a sequence without any reads nothing.

    Returns:
        The output `[B, H_q, n, d]`, and per sequence the mask of read entries among its `m`, bool `[H, n, m]` (without
        entries for a sequence without new tokens).

    Raises:
        BudgetError: A rating's shape differs from the contract of `Reader.rate`.
    """
    assert layer.value is not None
    output, read_masks = query.new_zeros(*query.shape[:3], layer.value.shape[-1]), []
    for sequence_index, reading in enumerate(row_readings):
        read_mask = query.new_zeros(layer.heads, query.shape[2], 0, dtype=torch.bool)
        if token_counts[sequence_index]:
            output[sequence_index], read_mask = _attend_row(
                query[sequence_index],
                layer,
                layer_index,
                sequence_index,
                first_column,
                scale,
                reading,
            )
        read_masks.append(read_mask)
    return output, read_masks


def _attend_row(
    query: Tensor,
    layer: RaggedLayer,
    layer_index: int,
    sequence_index: int,
    first_column: int,
    scale: float,
    reading: Reading,
) -> tuple[Tensor, Tensor]:
    """Apply `attend_few` to one sequence, `[H_q, n, d]`."""
    kv_heads, (_, query_count, head_dim) = layer.heads, query.shape
    segments = slice(sequence_index * kv_heads, (sequence_index + 1) * kv_heads)
    entry_count = layer.length[segments.start]  # nothing is evicted, so all heads hold the same number
    assert layer.key is not None and layer.value is not None
    row_indices = torch.tensor(layer.start[segments], device=layer.col.device)[:, None]
    row_indices = row_indices + torch.arange(entry_count, device=row_indices.device)
    entry_columns = layer.col[row_indices[0]]
    query_columns = torch.arange(
        first_column, first_column + query_count, dtype=torch.int32, device=entry_columns.device
    )
    visible_counts = (entry_columns <= query_columns[:, None]).sum(-1)  # entries that each query may read
    grouped_query = query.reshape(kv_heads, -1, query_count, head_dim)
    reading.check(entry_count)
    if entry_count <= reading.entries or reading.is_dense(layer_index):
        read_mask = (torch.arange(entry_count, device=entry_columns.device) < visible_counts[:, None]).expand(
            kv_heads, -1, -1
        )
    else:
        # Copies, because attention continues with the queries and with the layer's keys.
        ratings = _rated(reading, layer_index, grouped_query.clone(), layer.key[row_indices], visible_counts)
        read_mask = read_entries(
            ratings,
            visible_counts,
            reading.block,
            reading.shares(layer_index, visible_counts),
            entry_count,
        )
    if query_count == 1:  # every head reads the same number of entries, so they can be gathered
        row_indices, attention_mask = row_indices.gather(1, read_mask[:, 0].nonzero()[:, 1].view(kv_heads, -1)), None
    else:  # a padding query precedes all entries of its row; it sees everything and is never read
        sees_nothing = (visible_counts == 0)[:, None]
        attention_mask = (read_mask | sees_nothing)[None]
    key, value = layer.key[row_indices], layer.value[row_indices]
    if not is_plain(scale):
        output = materialised_attention(query[None], key[None], value[None], attention_mask, scale)
        return output[0], read_mask
    if attention_mask is not None:
        attention_mask = attention_mask.unsqueeze(2).expand(-1, -1, grouped_query.shape[1], -1, -1).flatten(2, 3)
    output = F.scaled_dot_product_attention(
        grouped_query.reshape(1, kv_heads, -1, head_dim),
        key[None],
        value[None],
        attn_mask=attention_mask,
        scale=scale,
    )
    return output[0].view(-1, query_count, value.shape[-1]), read_mask


def read_entries(
    ratings: Tensor,
    visible_counts: Tensor,
    block_size: int,
    entry_budgets: Tensor,
    entry_count: int,
) -> Tensor:
    """Choose the entries that queries read.

    Args:
        ratings: Ratings of the complete blocks, float32 `[H, n, K]`.
        visible_counts: Entries each query may read (a prefix of all entries), int64 `[n]`.
        block_size: Entries per block.
        entry_budgets: Entries each query reads, int64 `[n]`.
        entry_count: Entries held, `m`.

    Returns:
        Bool `[H, n, m]`.
    """
    block_count = -(-entry_count // block_size)
    block_starts = torch.arange(block_count, device=visible_counts.device) * block_size
    block_lengths = (visible_counts[:, None] - block_starts).clamp(0, block_size)  # [n, blocks]
    is_newest = block_starts // block_size == ((visible_counts - 1).clamp(min=0) // block_size)[:, None]
    rank_keys = F.pad(ratings, (0, block_count - ratings.shape[-1]))
    rank_keys = rank_keys.masked_fill(is_newest, float("inf")).masked_fill(block_lengths == 0, float("-inf"))
    # Flipped, so that a stable sort puts the newer of two equal blocks first.
    block_order = block_count - 1 - rank_keys.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    sorted_lengths = block_lengths.expand_as(rank_keys).gather(-1, block_order)
    remaining = (entry_budgets[:, None] - sorted_lengths.cumsum(-1) + sorted_lengths).clamp(min=0)
    block_shares = torch.empty_like(block_order).scatter_(-1, block_order, sorted_lengths.minimum(remaining))
    entry_indices = torch.arange(entry_count, device=visible_counts.device)
    block_offsets, block_indices = entry_indices % block_size, entry_indices // block_size
    block_ends = block_lengths[:, block_indices]
    return (block_offsets < block_ends) & (block_offsets >= block_ends - block_shares[..., block_indices])


def _rated(how: Reading, layer_index: int, query: Tensor, key: Tensor, visible_counts: Tensor) -> Tensor:
    """Return the reader's ratings of the complete blocks."""
    kv_heads, entry_count, head_dim = key.shape
    block_size = how.block
    block_count = entry_count // block_size
    shape = (kv_heads, query.shape[2], block_count)
    if not block_count:
        return query.new_zeros(shape, dtype=torch.float32)
    positions = torch.arange(block_count * block_size, device=key.device).view(block_count, block_size)
    blocks = key[:, : block_count * block_size].view(kv_heads, block_count, block_size, head_dim)
    reader_blocks = Blocks(layer_index, query, (visible_counts - 1).clamp(min=0), blocks, positions, how.info)
    inputs = (
        reader_blocks.query,
        reader_blocks.query_position,
        reader_blocks.key,
        reader_blocks.position,
    )
    versions_before = versions(*inputs)
    ratings = how.reader.rate(reader_blocks)
    if versions(*inputs) != versions_before:
        raise BudgetError(f"reader {how.reader.name} changed its inputs in place; change a copy instead")
    check_floating(f"reader {how.reader.name}", ratings)
    if ratings.shape != shape:
        raise BudgetError(f"reader {how.reader.name} returned shape {list(ratings.shape)}; return {list(shape)}")
    return ratings.float()
