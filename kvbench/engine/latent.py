"""Multi-head latent attention (MLA, DeepSeek-V2 and later): entries are latents, with one KV head.

transformers caches a latent `c` and the rotary part of the key, and expands them to keys `[W_UK c, k_rot]` and values
`W_UV c` after the cache. Expanding all cached entries in every step is avoided by the absorbed form: with the query
`[W_UK^T q_nope, q_rot]`, the key `[c, k_rot]` and the value `c`, attention gives the same weights, and `W_UV` expands
the output. A prefill uses the expanded keys and values that the model passes, which takes fewer operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvbench.engine.layer import RaggedLayer
from kvbench.engine.quantization import plain_weight


def is_latent(attention: Any) -> bool:
    """Return whether an attention module caches latents that it expands to keys and values."""
    return hasattr(attention, "expand_kv") and hasattr(attention, "kv_b_proj")


def entry_dim(attention: Any) -> int:
    """Return the numbers of an entry: the latent and the rotary part of the key."""
    return int(attention.kv_lora_rank) + int(attention.qk_rope_head_dim)


def expansion(attention: Any) -> tuple[Tensor, Tensor]:
    """Return `W_UK` `[H_q, d_nope, r]` and `W_UV` `[H_q, d_v, r]`, which expand latents of rank `r`."""
    key_dim, value_dim, rank = (
        int(size) for size in (attention.qk_nope_head_dim, attention.v_head_dim, attention.kv_lora_rank)
    )
    # The parameters of quantised layers can be integers.
    dtypes = (parameter.dtype for parameter in attention.parameters() if parameter.is_floating_point())
    weight = plain_weight(attention.kv_b_proj, rank, next(dtypes, torch.float32))
    head_weights = weight.view(-1, key_dim + value_dim, rank)
    return head_weights[:, :key_dim], head_weights[:, key_dim:]


def absorb(attention: Any, query: Tensor, layer: RaggedLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Replace the pending latents of a layer by keys and values of one KV head.

    Args:
        attention: The attention module.
        query: `[B, H_q, n, d_nope + d_rope]`.
        layer: Its cache layer, whose pending keys are latents `[B, 1, n, r]` and values rotary parts.

    Returns:
        Query `[B, H_q, n, r + d_rope]`, new keys `[B, 1, n, r + d_rope]` and new values `[B, 1, n, r]`.
    """
    assert layer.pending is not None
    latent, rotary = layer.pending
    key_weight, _ = expansion(attention)
    key_dim = key_weight.shape[1]
    absorbed = torch.einsum("bhnd,hdr->bhnr", query[..., :key_dim], key_weight.to(query.dtype))
    key = torch.cat([latent, rotary], -1)
    layer.pending = key, latent
    layer.dim, layer.value_dim, layer.is_latent = key.shape[-1], latent.shape[-1], True
    return torch.cat([absorbed, query[..., key_dim:]], -1), key, latent


def expand_output(attention: Any, output: Tensor) -> Tensor:
    """Expand attention over latents, `[B, H_q, n, r]`, to the module's values, `[B, H_q, n, d_v]`."""
    _, value_weight = expansion(attention)
    return torch.einsum("bhnr,hvr->bhnv", output, value_weight.to(output.dtype))


def output_weight(attention: Any, projection: Tensor) -> Tensor:
    """Return `W_UV W_O`, which maps a latent to its part of the module's output.

    Args:
        attention: The attention module.
        projection: Output projection of the expanded values, `[H_q, d_v, d_model]`.

    Returns:
        `[H_q, r, d_model]`.
    """
    _, value_weight = expansion(attention)
    return torch.einsum("hvr,hvm->hrm", value_weight.to(projection), projection)
