"""Pruned key channels: a head stores only those channels of its keys that its queries read most.

The criterion is that of ThinK (Xu, Jie, Dong, Wang, Lu, Zhou, Saha, Xiong, Sahoo, arXiv 2407.21018,
section 3.2). A layer with pruned keys stores the channels of every head in an order of its own, the
kept ones first, so that a pruned key is the start of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def channel_order(query: Tensor, key: Tensor, keep: Tensor, kept: int) -> Tensor:
    """Choose the channels that heads keep, and put them first.

    With the queries of the window `Q` and the held keys `K` of a head, channel `c` is worth

        || Q[:, c] K[:, c]^T ||_F  =  || Q[:, c] ||_2 || K[:, c] ||_2

    which is what the logits lose without it. The queries of all query heads of a KV head count as
    one `Q`. Among equal channels the first is kept.

    Args:
        query: Last queries after RoPE, `[B, H_q, w, d]`; zeros for missing ones.
        key: Keys after RoPE, `[B, H, n, d]`.
        keep: Entries that are held, bool `[B, H, n]`.
        kept: Channels to keep.

    Returns:
        The kept channels, ascending, and then the others, `[B, H, d]`; see `order_dtype`.
    """
    heads, dim = key.shape[1], key.shape[-1]
    of_query = query.float().square().sum(2).unflatten(1, (heads, -1)).sum(2)
    of_key = (key.float().square() * keep[..., None]).sum(2)
    best = (of_query * of_key).argsort(dim=-1, descending=True, stable=True)[..., :kept]
    pruned = torch.ones_like(of_key, dtype=torch.int8).scatter_(-1, best, 0)
    with torch.inference_mode(False):  # later forwards in any mode read it
        return pruned.argsort(dim=-1, stable=True).to(order_dtype(dim))


def order_dtype(dim: int) -> torch.dtype:
    """The dtype of channel numbers."""
    return torch.uint8 if dim <= 256 else torch.int16


def reordered(x: Tensor, order: Tensor | None) -> Tensor:
    """Put channels in the order in which they are stored.

    Args:
        x: Queries or keys, `[B, H_q or H, n, d]`.
        order: As `channel_order` returns it; None: the model's own order.
    """
    return x if order is None else _gathered(x, order.long())


def restored(x: Tensor, order: Tensor | None) -> Tensor:
    """Put stored channels in the model's own order; the inverse of `reordered`."""
    return x if order is None else _gathered(x, order.long().argsort(-1))


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    index = index.repeat_interleave(x.shape[1] // index.shape[1], 1)
    return x.gather(-1, index[:, :, None].expand_as(x))
