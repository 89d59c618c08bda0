"""Pruned key channels: each head stores only the key channels its queries use most.

The criterion is that of ThinK (Xu, Jie, Dong, Wang, Lu, Zhou, Saha, Xiong, Sahoo, arXiv 2407.21018, section 3.2). A
layer with pruned keys orders the channels of each head so that the kept ones come first; a pruned key is the start of a
row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def channel_order(query: Tensor, key: Tensor, entry_mask: Tensor, kept_channels: int) -> Tensor:
    """Choose the channels that heads keep, and put them first.

    With the queries of the window `Q` and the held keys `K` of a head, the value of channel `c` is

        || Q[:, c] K[:, c]^T ||_F  =  || Q[:, c] ||_2 || K[:, c] ||_2

    which the logits lose without it. The queries of all query heads of a KV head count as one `Q`. Among equal channels
    the first is kept.

    Args:
        query: Last queries after RoPE, `[B, H_q, w, d]`; zeros for missing ones.
        key: Keys after RoPE, `[B, H, n, d]`.
        entry_mask: Held entries, bool `[B, H, n]`.
        kept_channels: Number of channels to keep.

    Returns:
        The kept channels in ascending order, followed by the others, `[B, H, d]`; see `order_dtype`.
    """
    kv_heads, head_dim = key.shape[1], key.shape[-1]
    query_energy = query.float().square().sum(2).unflatten(1, (kv_heads, -1)).sum(2)
    key_energy = (key.float().square() * entry_mask[..., None]).sum(2)
    best_channels = (query_energy * key_energy).argsort(dim=-1, descending=True, stable=True)[..., :kept_channels]
    is_pruned = torch.ones_like(key_energy, dtype=torch.int8).scatter_(-1, best_channels, 0)
    with torch.inference_mode(False):  # later forwards read it in any mode
        return is_pruned.argsort(dim=-1, stable=True).to(order_dtype(head_dim))


def order_dtype(head_dim: int) -> torch.dtype:
    """Return the dtype of channel indices."""
    return torch.uint8 if head_dim <= 256 else torch.int16


def reordered(states: Tensor, stored_order: Tensor | None) -> Tensor:
    """Put channels in stored order.

    Args:
        states: Queries or keys, `[B, H_q or H, n, d]`.
        stored_order: Result of `channel_order`; None: the model's own order.
    """
    return states if stored_order is None else _gathered(states, stored_order.long())


def restored(states: Tensor, stored_order: Tensor | None) -> Tensor:
    """Put stored channels in the model's own order (the inverse of `reordered`)."""
    return states if stored_order is None else _gathered(states, stored_order.long().argsort(-1))


def _gathered(states: Tensor, channel_index: Tensor) -> Tensor:
    channel_index = channel_index.repeat_interleave(states.shape[1] // channel_index.shape[1], 1)
    return states.gather(-1, channel_index[:, :, None].expand_as(states))
