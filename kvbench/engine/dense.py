"""Softmax attention over dense keys and values, with soft caps and attention sinks where a family has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench import native
from kvbench.view.softmax import attention_weights, cap_of, capped, is_plain, sinks_of

_BLOCK = 1 << 23
"""Maximum number of float32 attention weights held at once per sequence, if weights are materialised."""

_BLOCK_QUERIES = 64
"""Queries of a block of `_attend_in_blocks`."""
_KEYS_PER_CHANNEL = 256
"""Keys of all query heads, per channel, up to which `_attend_in_blocks` is about as fast as SDPA: weights of more keys
leave the processor's cache, and with more channels there is more arithmetic for each weight."""
_FEW_THREADS = 2
"""Threads up to which `_attend_in_blocks` is about as fast as SDPA: it has little to share out."""

_FLASH = torch._scaled_dot_product_flash_attention_for_cpu
"""What SDPA calls on a CPU; it also returns the log-sum-exp. `torch.ops` has it too, but takes 5 us longer a call."""


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool = False
) -> Tensor:
    """Compute softmax attention; KV heads may be fewer than query heads.

    Args:
        query: `[B, H_q, n, d]`.
        key, value: `[B, H, S, d]` and `[B, H, S, d_v]`.
        mask: Bool (true: visible) or additive mask, broadcastable to `[B, 1, n, S]`; None: all.
        scale: Scaling factor of the logits, with a soft cap and sinks if the family has them.
        is_causal: Whether query `i` sees the keys up to `i`; `mask` is None then.

    Returns:
        `[B, H_q, n, d_v]`.
    """
    learns = torch.is_grad_enabled() and query.requires_grad
    sinks = sinks_of(scale)
    if is_plain(scale):
        group_size = query.shape[1] // key.shape[1]
        # On a CPU and, without a mask, on a GPU, kernels share K and V within a group; elsewhere they must be repeated.
        shares_kv = not learns and (query.device.type == "cpu" or mask is None)
        if group_size > 1 and not shares_kv:
            key, value = key.repeat_interleave(group_size, 1), value.repeat_interleave(group_size, 1)
        enable_gqa = group_size > 1 and shares_kv
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if sinks is not None and not learns and has_flash(query, key, value, scale):
        output, log_total = flash_attention(query, key, value, mask, scale, is_causal=is_causal)
        return with_sinks(output, log_total, sinks[:, None])
    return materialised_attention(query, key, value, mask, scale, is_causal=is_causal)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, powers: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
    """Compute attention of all tokens of prompts without padding, by native code or by blocks where that is faster.

    Args:
        query: `[B, H_q, n, d]`.
        key, value: `[B, H, n, d]` and `[B, H, n, d_v]`.
        scale: As for `dense_attention`.
        powers: Powers of the attention weights to sum over the queries.

    Returns:
        Output `[B, H_q, n, d_v]`; by power what every key receives, float32 `[B, H_q, n]`: where the weights are at
        hand, in native code and in blocks; and what it receives from the last `native.WINDOW` queries, if native code
        sums that (see `native.causal_attention`).
    """
    if is_plain(scale) and set(powers) <= set(native.POWERS):
        if native.can_attend_causally(query, key, value):
            return native.causal_attention(query, key, value, scale, powers)
        if _fits_blocks(query, key, value):
            sequences = zip(query.split(1), key.split(1), value.split(1), strict=True)
            outputs, sums = zip(*(_attend_in_blocks(*inputs, scale, powers) for inputs in sequences), strict=True)
            by_power = {power: torch.stack([own_sums[power] for own_sums in sums]).flatten(1, 2) for power in powers}
            return torch.stack(outputs).flatten(1, 2), by_power, None
    return dense_attention(query, key, value, None, scale, is_causal=query.shape[2] > 1), {}, None


def _fits_blocks(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether `_attend_in_blocks` is as fast as SDPA, which spreads over more threads and does not sum."""
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.float32
        and 1 < query.shape[2] == key.shape[2]
        and query.shape[1] * key.shape[2] <= _KEYS_PER_CHANNEL * query.shape[3]
        and torch.get_num_threads() <= _FEW_THREADS
        and not learns
    )


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, powers: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute `causal_attention` of one sequence in blocks of queries, whose weights stay in the processor's cache.

    Returns:
        Output `[H, G, n, d_v]`, and by power what every key receives, `[H, G, n]`.
    """
    token_count, kv_heads = query.shape[2], key.shape[1]
    group_size = query.shape[1] // kv_heads
    # The query heads of a token lie together, so a block is a slice.
    scaled_query = (query[0].unflatten(0, (kv_heads, group_size)).transpose(1, 2) * scale).flatten(1, 2)
    transposed_key, value = key[0].transpose(1, 2), value[0]
    output = value.new_empty(kv_heads, token_count * group_size, value.shape[-1])
    sums = {power: value.new_zeros(kv_heads, group_size, token_count) for power in powers}
    is_later = value.new_full((_BLOCK_QUERIES, _BLOCK_QUERIES), float("-inf")).triu_(1)[:, None]
    memory = value.new_empty(query.shape[1] * _BLOCK_QUERIES * token_count)
    for start in range(0, token_count, _BLOCK_QUERIES):
        stop = min(start + _BLOCK_QUERIES, token_count)
        rows = slice(start * group_size, stop * group_size)
        shape = kv_heads, group_size * (stop - start), stop
        weights = memory[: math.prod(shape)].view(shape)
        torch.bmm(scaled_query[:, rows], transposed_key[..., :stop], out=weights)
        by_head = weights.view(kv_heads, stop - start, group_size, stop)
        by_head[..., start:] += is_later[: stop - start, :, : stop - start]
        torch.softmax(weights, -1, out=weights)
        torch.bmm(weights, value[:, :stop], out=output[:, rows])
        for power in powers:
            sums[power][..., :stop] += (by_head if power == 1 else by_head.square()).sum(1)
    return output.view(kv_heads, token_count, group_size, -1).transpose(1, 2), sums


def has_flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Return whether `flash_attention` can compute an attention."""
    return query.device.type == "cpu" and cap_of(scale) is None and query.shape[-1] == key.shape[-1] == value.shape[-1]


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute plain attention on a CPU, as SDPA does, and the log-sum-exp of every query, float32 `[B, H_q, n]`.

    Args:
        query, key, value, mask, is_causal: See `dense_attention`.
        scale: Scaling factor of the logits; its sinks are left to `with_sinks`.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    flash: tuple[Tensor, Tensor] = _FLASH(query, key, value, 0.0, is_causal, attn_mask=mask, scale=float(scale))
    return flash


def with_sinks(output: Tensor, log_total: Tensor, sinks: Tensor) -> Tensor:
    """Add sinks to plain attention, in place.

    A sink only adds to the denominator of the softmax, so the plain output is multiplied by
    `sigmoid(logsumexp - sink)`.

    Args:
        output, log_total: See `flash_attention`.
        sinks: Sink logits, broadcastable to `log_total`.
    """
    return output.mul_(torch.sigmoid(log_total - sinks)[..., None])


def materialised_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool = False
) -> Tensor:
    """Compute `dense_attention` with materialised weights, by blocks of queries.

    The mask can differ between KV heads: `[B, H, n, S]`.
    """
    kv_heads, column_count, query_count = key.shape[1], key.shape[2], query.shape[2]
    grouped_query = query.unflatten(1, (kv_heads, -1)).float()
    transposed_key, grouped_value = key.float()[:, :, None].transpose(-1, -2), value.float()[:, :, None]
    columns = torch.arange(column_count, device=query.device)
    block_size = max(1, _BLOCK // (query.shape[1] * column_count))
    blocks = []
    for block_start in range(0, query_count, block_size):
        rows = slice(block_start, min(block_start + block_size, query_count))
        logits = capped(grouped_query[:, :, :, rows] @ transposed_key * scale, scale)
        if is_causal:
            logits = logits.masked_fill(columns > columns[rows, None], float("-inf"))
        elif mask is not None:
            block_mask = (mask if mask.shape[-2] == 1 else mask[..., rows, :])[:, :, None]
            is_bool = mask.dtype == torch.bool
            logits = logits.masked_fill(~block_mask, float("-inf")) if is_bool else logits + block_mask
        blocks.append(attention_weights(logits, scale).nan_to_num(0.0) @ grouped_value)
    return torch.cat(blocks, 3).flatten(1, 2).to(query.dtype)
