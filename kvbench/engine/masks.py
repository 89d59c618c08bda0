"""Caches that hold chosen entries of one prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache


def everything(cache: RaggedCache) -> list[Tensor]:
    """Return masks that keep every entry of a dense cache, bool `[B, H, T]` per full-attention layer."""
    keys = [layer.key for layer in cache.ragged if layer.key is not None]
    return [torch.ones(key.shape[:3], dtype=torch.bool, device=key.device) for key in keys]


def keep_only(cache: RaggedCache, keep_masks: Sequence[Tensor], reserved_tokens: int) -> RaggedCache:
    """Return a packed copy of a dense cache with only the entries to keep.

    Args:
        cache: A dense cache; not changed.
        keep_masks: Entries to keep, bool `[B, H, T]` per full-attention layer, on any device.
        reserved_tokens: Number of tokens to reserve space for.
    """
    packed_cache = cache.fork()
    _pack(cache, packed_cache, keep_masks, reserved_tokens)
    return packed_cache


def masked_copies(cache: RaggedCache, keep_masks: Sequence[Tensor], reserved_tokens: int) -> RaggedCache:
    """Return a batch of packed copies of one dense sequence, each with its own entries.

    Args:
        cache: A dense cache of one sequence; not changed.
        keep_masks: Entries of every copy, bool `[copies, H, T]` per full-attention layer, on any device.
        reserved_tokens: Number of tokens to reserve space for.
    """
    first_entries = [mask.new_zeros((1, *mask.shape[1:])) for mask in keep_masks]
    for first_entry in first_entries:
        first_entry[..., 0] = True
    # One entry stands for the full-attention layers while the other layers and the columns are repeated.
    copies = RaggedCache.stack([keep_only(cache, first_entries, 0)] * len(keep_masks[0]))
    _pack(cache, copies, keep_masks, reserved_tokens)
    return copies


def _pack(dense: RaggedCache, packed: RaggedCache, keep_masks: Sequence[Tensor], reserved_tokens: int) -> None:
    """Fill the full-attention layers of a cache with entries of a dense one."""
    for dense_layer, packed_layer, kept_mask in zip(dense.ragged, packed.ragged, keep_masks, strict=True):
        assert dense_layer.key is not None and dense_layer.value is not None
        kept_here = kept_mask.to(dense_layer.key.device)
        columns = torch.arange(kept_here.shape[-1], device=kept_here.device).expand(dense_layer.key.shape[:3])
        packed_layer.pack(dense_layer.key, dense_layer.value, kept_here, columns, {}, reserved_tokens)
