"""The softmax of a model's attention: its scale, and for some families a soft cap and attention sinks."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor


class LogitScale(float):
    """Scaling factor of the attention logits, with what some families add to the softmax.

    It is a float, so whatever only multiplies by the scale needs no change. Whatever computes attention weights itself
    calls `capped` and `attention_weights`.

    Attributes:
        cap: Soft cap `c`: a scaled logit `z` becomes `c tanh(z / c)` (Gemma 2); None: no cap.
        sinks: Logit of each query head's attention sink, float32 `[H_q]`: it takes part in the softmax but has no value
            (gpt-oss); None: no sinks.
    """

    cap: float | None
    sinks: Tensor | None

    def __new__(cls, scale: float, cap: float | None = None, sinks: Tensor | None = None) -> Self:
        """Return the scale with a soft cap and sinks, `[H_q]` or a shape that flattens to it."""
        logit_scale = super().__new__(cls, scale)
        logit_scale.cap = cap
        logit_scale.sinks = None if sinks is None else sinks.detach().reshape(-1).float()
        return logit_scale


def cap_of(scale: float) -> float | None:
    """Return the soft cap of the logits, if any."""
    return scale.cap if isinstance(scale, LogitScale) else None


def sinks_of(scale: float) -> Tensor | None:
    """Return the logit of each query head's sink, float32 `[H_q]`, if there are sinks."""
    return scale.sinks if isinstance(scale, LogitScale) else None


def is_plain(scale: float) -> bool:
    """Return whether attention is plain softmax attention, without a soft cap or sinks."""
    return cap_of(scale) is None and sinks_of(scale) is None


def capped(logits: Tensor, scale: float) -> Tensor:
    """Apply the soft cap, if any, to scaled logits (before masking)."""
    cap = cap_of(scale)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def attention_weights(logits: Tensor, scale: float, kv_head: int | None = None) -> Tensor:
    """Return the softmax of scaled, capped and masked logits; with sinks, the weights of a query sum to less than 1.

    Args:
        logits: `[B, H, G, n, S]`, or `[G, n, S]` for one KV head.
        scale: Scale of the logits; its sinks take part.
        kv_head: Index of the only KV head of `logits`; None: all.

    Returns:
        A tensor shaped like `logits`; NaN for a query that sees no entry.
    """
    sinks = sinks_of(scale)
    if sinks is None:
        return logits.softmax(-1)
    group_size = logits.shape[-3]
    sinks = sinks.to(logits.device).view(-1, group_size, 1, 1)
    sink_logits = sinks if kv_head is None else sinks[kv_head]
    log_total = logits.logsumexp(-1, keepdim=True)
    return logits.softmax(-1) * torch.sigmoid(log_total - sink_logits)
