"""Attention of new queries over the ragged segments of a packed layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench import native
from kvbench.engine.dense import flash_attention, has_flash, with_sinks
from kvbench.engine.kernels.ragged_attention import kernel_fits, reads_in_place
from kvbench.engine.layer import RaggedLayer
from kvbench.view.softmax import attention_weights, capped, is_plain, sinks_of

_FEW = 32
"""Queries per sequence up to which native code is preferred to a CPU's matrix instructions."""
_BLOCK = 1 << 23
"""Maximum number of float32 attention weights held at once per sequence, if weights are materialised."""


def attend(
    query: Tensor,
    layer: RaggedLayer,
    first_column: int,
    scale: float,
    powers: Sequence[int] = (),
    valid_queries: Tensor | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute attention of new queries over a packed layer that already holds their entries.

    Logical columns decide causality among new tokens. On an NVIDIA GPU a Triton kernel reads the segments in place,
    unless a gradient is required or triton is not installed. On a CPU native code does in float32 and bfloat16; what it
    cannot compute gets a copy of shared entries.

    Args:
        query: `[B, H_q, n, d]`.
        layer: A packed layer.
        first_column: Logical column of the first new query.
        scale: Scaling factor of the logits, with a soft cap and sinks if the family has them (`LogitScale`).
        powers: Also sum these powers of the attention weights over the queries.
        valid_queries: New queries that are tokens, bool `[B, n]`; None: all. Padding is not accumulated.

    Returns:
        Output `[B, H_q, n, d_v]`, and by power the accumulated attention of every entry from each query head, float32
        `[entries, G]` in the order of `layer.rows()`.
    """
    needs_gradient = torch.is_grad_enabled() and query.requires_grad
    assert layer.key is not None and layer.value is not None
    if kernel_fits(layer.key, layer.value) and not needs_gradient:
        readable = layer if reads_in_place(layer.key) and not powers else layer.with_own_rows()
        return _attend_kernel(query, readable, first_column, scale, powers, valid_queries)
    is_fast = query.shape[2] <= _FEW or not native.has_matrix_code(query.dtype)
    is_native = is_fast and is_plain(scale) and native.can_attend(query, layer.key, layer.value)
    layer = layer.with_own_rows() if powers or not is_native else layer
    assert layer.key is not None and layer.value is not None
    if is_native and set(powers) <= set(native.POWERS):
        rows = (layer.key, layer.value, layer.col, *layer.bounds())
        addresses = layer.shared_addresses()
        return native.ragged_attention(query, *rows, addresses, first_column, scale, powers, valid_queries)
    if query.device.type != "cpu":
        return _attend_padded(query, layer, first_column, scale, powers, valid_queries)
    by_sdpa = is_plain(scale) or (has_flash(query, layer.key, layer.value, scale) and not needs_gradient)
    if powers or not by_sdpa:
        return _attend_segments_mass(query, layer, first_column, scale, powers, valid_queries)
    return _attend_segments(query, layer, scale), {}


def ignores_width(layer: RaggedLayer, group_size: int) -> bool:
    """Return whether a query of a packed layer has the same bits in attention of any number of queries above 8.

    Native code then computes all of them side by side (`attend_wide` in `kernels.c`).

    Args:
        layer: The layer.
        group_size: Query heads per KV head.
    """
    assert layer.key is not None and layer.value is not None
    is_native = is_plain(layer.scale) and native.can_attend(layer.key, layer.key, layer.value)
    is_wide = group_size <= native.LEAST_WIDE and not native.has_matrix_code(layer.key.dtype)
    return is_native and is_wide and not layer.is_latent


def _attend_kernel(
    query: Tensor,
    layer: RaggedLayer,
    first_column: int,
    scale: float,
    powers: Sequence[int],
    valid_queries: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Run the Triton kernel. A sequence's result does not depend on the rest of the batch."""
    from kvbench.engine.kernels.ragged_attention.triton import ragged_attention

    assert layer.key is not None and layer.value is not None
    layer_tensors, segment_bounds = (layer.key, layer.value, layer.col), layer.bounds()
    output, attention_sums = ragged_attention(
        query,
        *layer_tensors,
        *segment_bounds,
        layer.entry_counts(),
        layer.shared_addresses(),
        first_column,
        scale,
        powers,
        valid_queries,
    )
    return output, dict(zip(powers, attention_sums, strict=True))


def _attend_segments(query: Tensor, layer: RaggedLayer, scale: float) -> Tensor:
    """Call SDPA for segments without copying K or V, which is fastest on a CPU.

    Neighbouring segments share a call if they hold the same number of entries. A sequence's result does not depend on
    the rest of the batch.
    """
    batch_size, query_heads, query_count, head_dim = query.shape
    query_rows = query_heads // layer.heads * query_count
    sinks = sinks_of(scale)
    key, value = layer.key, layer.value
    assert key is not None and value is not None
    value_dim = value.shape[-1]
    runs = [*_even_runs(layer.start, layer.length)]
    queries = query.reshape(1, -1, query_rows, head_dim).split([len(run) for run in runs], 1)
    longest_mask = _mask_of_last(query, max(layer.length), query_rows // query_count) if query_count > 1 else None
    storage_offsets = [tensor.storage_offset() for tensor in (key, value)]  # a layer can be a slice of another
    output, log_totals = [], []
    for run, run_query in zip(runs, queries, strict=True):
        first_row, entry_count, mask = layer.start[run[0]], layer.length[run[0]], None
        if entry_count == 0:
            output.append(run_query.new_zeros(*run_query.shape[:3], value_dim))
            log_totals.append(run_query.new_zeros(run_query.shape[:3], dtype=torch.float32))
            continue
        distance = layer.start[run[1]] - first_row if len(run) > 1 else entry_count
        # Slicing takes several operations, which add up to half the time of a decode step.
        run_key, run_value = (
            tensor.as_strided(
                (1, len(run), entry_count, dim), (0, distance * dim, dim, 1), storage_offset + first_row * dim
            )
            for tensor, dim, storage_offset in zip((key, value), (head_dim, value_dim), storage_offsets, strict=True)
        )
        if longest_mask is not None:
            mask = longest_mask[:, longest_mask.shape[1] - entry_count :]  # padding may see nothing; it is never read
        inputs = run_query, run_key, run_value, mask
        if sinks is None:
            output.append(F.scaled_dot_product_attention(*inputs, scale=scale))
        else:
            run_output, log_total = flash_attention(*inputs, scale)
            output.append(run_output)
            log_totals.append(log_total)
    joined = torch.cat(output, 1).view(batch_size, query_heads, query_count, value_dim)
    if sinks is None:
        return joined
    return with_sinks(joined, torch.cat(log_totals, 1).view(joined.shape[:3]), sinks[:, None])


def _even_runs(first_rows: Sequence[int], lengths: Sequence[int]) -> Iterator[range]:
    """Group neighbouring segments that hold the same number of entries, at equal distances in memory."""
    first = 0
    for segment in range(1, len(lengths) + 1):
        if segment < len(lengths) and lengths[segment] == lengths[first]:
            distance = first_rows[segment] - first_rows[segment - 1]
            if distance > 0 and distance == first_rows[first + 1] - first_rows[first]:
                continue
        yield range(first, segment)
        first = segment


def _mask_of_last(query: Tensor, entry_count: int, group_size: int) -> Tensor:
    """Return the additive mask of new queries over entries of which the last are their own, `[G * n, entries]`.

    That of fewer entries is its end.
    """
    query_count = query.shape[2]
    mask = query.new_zeros(query_count, max(entry_count, query_count))
    mask[:, -query_count:] = mask.new_full((query_count, query_count), float("-inf")).triu_(1)
    return mask.repeat(group_size, 1)


def _attend_segments_mass(
    query: Tensor,
    layer: RaggedLayer,
    first_column: int,
    scale: float,
    powers: Sequence[int],
    valid_queries: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Process segments one by one with materialised weights; also independent of the batch."""
    batch_size, query_heads, query_count, head_dim = query.shape
    group_size = query_heads // layer.heads
    assert layer.key is not None and layer.value is not None
    grouped_query = query.reshape(batch_size * layer.heads, group_size, query_count, head_dim).float().unbind(0)
    value_dim = layer.value.shape[-1]
    output = torch.zeros(batch_size * layer.heads, group_size, query_count, value_dim, dtype=query.dtype)
    attention_sums: dict[int, list[Tensor]] = {power: [] for power in powers}
    query_columns = torch.arange(first_column, first_column + query_count, dtype=torch.int32)[:, None]
    for segment, (first_row, entry_count) in enumerate(zip(layer.start, layer.length, strict=True)):
        key = layer.key[first_row : first_row + entry_count].float()
        value = layer.value[first_row : first_row + entry_count].float()
        entry_columns = layer.col[first_row : first_row + entry_count]
        power_sums = {power: torch.zeros(group_size, entry_count) for power in powers}
        block_size = max(1, _BLOCK // (group_size * max(1, entry_count)))
        for block_start in range(0, query_count if entry_count else 0, block_size):
            block_rows = slice(block_start, min(block_start + block_size, query_count))
            is_hidden = (entry_columns > query_columns[block_rows]) & (query_columns[block_rows] >= entry_columns[0])
            logits = capped(grouped_query[segment][:, block_rows] @ key.T * scale, scale)
            logits = logits.masked_fill_(is_hidden, float("-inf"))
            weights = attention_weights(logits, scale, segment % layer.heads)
            output[segment][:, block_rows] = (weights @ value).to(query.dtype)
            is_token = query_columns[block_rows] >= entry_columns[0]
            if valid_queries is not None:
                is_token = is_token & valid_queries[segment // layer.heads, block_rows, None]
            for power in powers:
                power_sums[power] += (weights.pow(power) * is_token).sum(1)
        for power in powers:
            attention_sums[power].append(power_sums[power].T)
    return output.view(batch_size, query_heads, query_count, value_dim), {
        power: torch.cat(segment_sums) for power, segment_sums in attention_sums.items()
    }


def _attend_padded(
    query: Tensor,
    layer: RaggedLayer,
    first_column: int,
    scale: float,
    powers: Sequence[int],
    valid_queries: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Gather the segments into a padded tensor (on a GPU without the kernel); weights by blocks."""
    batch_size, query_heads, query_count, head_dim = query.shape
    group_size = query_heads // layer.heads
    assert layer.key is not None and layer.value is not None
    row_indices, live_mask = layer.padded_rows()
    key, value, entry_columns = layer.key[row_indices], layer.value[row_indices], layer.col[row_indices]
    query_columns = torch.arange(first_column, first_column + query_count, dtype=torch.int32, device=query.device)[
        :, None
    ]
    is_visible = (entry_columns[:, :, None] <= query_columns) & live_mask[:, :, None]
    # Queries without any entry (padding, an empty segment) see everything; they are never read.
    sees_nothing = ~is_visible.any(-1, keepdim=True)
    attention_mask = (is_visible | sees_nothing)[:, :, None]
    if not powers and is_plain(scale):
        expanded_mask = attention_mask.expand(-1, -1, group_size, -1, -1).flatten(2, 3)
        grouped_query = query.reshape(batch_size, layer.heads, group_size * query_count, head_dim)
        output = F.scaled_dot_product_attention(grouped_query, key, value, attn_mask=expanded_mask, scale=scale)
        return output.view(batch_size, query_heads, query_count, value.shape[-1]), {}
    grouped_query = query.reshape(batch_size, layer.heads, group_size, query_count, head_dim)
    is_token = ~sees_nothing
    if valid_queries is not None:
        is_token = is_token & valid_queries[:, None, :, None]
    broadcast_key, broadcast_value = key.float()[:, :, None], value.float()[:, :, None]
    power_sums = {power: broadcast_key.new_zeros(batch_size, layer.heads, group_size, key.shape[2]) for power in powers}
    output_blocks = []
    block_size = max(1, _BLOCK // (query_heads * max(1, key.shape[2])))
    for block_start in range(0, query_count, block_size):
        block_rows = slice(block_start, block_start + block_size)
        logits = capped(grouped_query[:, :, :, block_rows].float() @ broadcast_key.transpose(-1, -2) * scale, scale)
        logits = logits.masked_fill_(~attention_mask[:, :, :, block_rows], float("-inf"))
        weights = attention_weights(logits, scale)
        output_blocks.append(weights @ broadcast_value)
        for power in powers:
            power_sums[power] += (weights.pow(power) * is_token[:, :, None, block_rows]).sum(3)
    output = torch.cat(output_blocks, 3).to(query.dtype).view(batch_size, query_heads, query_count, value.shape[-1])
    return output, {power: sums.transpose(2, 3)[live_mask] for power, sums in power_sums.items()}
