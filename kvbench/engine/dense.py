"""Softmax attention over dense keys and values, with soft caps and attention sinks where a family has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench import native
from kvbench.view.softmax import attention_weights, cap_of, capped, is_plain, sinks_of

_BLOCK = 1 << 23
"""Maximum number of float32 attention weights held at once per sequence, if weights are materialised."""

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
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute attention of all tokens of prompts without padding, by native code where that is faster.

    Args:
        query: `[B, H_q, n, d]`.
        key, value: `[B, H, n, d]` and `[B, H, n, d_v]`.
        scale: As for `dense_attention`.
        powers: Powers of the attention weights to sum over the queries.

    Returns:
        Output `[B, H_q, n, d_v]`, and by power what every key receives, float32 `[B, H_q, n]`: by native code only,
        which has the weights at hand.
    """
    if is_plain(scale) and set(powers) <= set(native.POWERS) and native.can_attend_causally(query, key, value):
        return native.causal_attention(query, key, value, scale, powers)
    return dense_attention(query, key, value, None, scale, is_causal=query.shape[2] > 1), {}


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
