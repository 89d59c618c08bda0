"""transformers' attention implementations, in the forwards that need no attention of kvbench's own.

Attention over packed caches is always kvbench's own, and by default the dense prefill is, too. A model can instead be
told to use an implementation of transformers for the prefill and for everything that kvbench leaves to transformers:
sliding-window layers, forwards without a ragged cache, and vision towers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask
from transformers.modeling_flash_attention_utils import _flash_attention_forward, flash_attn_supports_top_left_mask

from kvbench.engine.contract import family_of, logit_scale
from kvbench.engine.dense import dense_attention
from kvbench.engine.models import decoder_of
from kvbench.errors import UserError
from kvbench.view.softmax import LogitScale

SDPA, EAGER, FLASH = "sdpa", "eager", "flash_attention_2"

_MASKS: dict[str, Callable[..., Any]] = {SDPA: sdpa_mask, EAGER: eager_mask, FLASH: flash_attention_mask}

_SUFFIXES = {SDPA: "", EAGER: "_eager", FLASH: "_fa2"}
"""Suffixes of registered names; transformers takes every name that contains "flash" for a kernel."""

_CHOSEN = "_kvbench_attention"
"""Attribute of a decoder that does not use SDPA."""


def choose_attention(model: nn.Module, implementation: str) -> None:
    """Let kvbench use an implementation for a model's decoder from the next attachment on."""
    decoder_of(model).__dict__[_CHOSEN] = implementation


def chosen_attention(model: nn.Module) -> str:
    """Return the implementation that kvbench uses for a model."""
    return str(decoder_of(model).__dict__.get(_CHOSEN, SDPA))


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any] | None = None) -> None:
    """Register an attention function with transformers, once for each implementation.

    Args:
        name: Registered name; see `registered_name`.
        attention: Attention function with a keyword `implementation`.
        mask: Mask function with a keyword `stock_mask`, transformers' own; None registers transformers' own.
    """
    for implementation, stock_mask in _MASKS.items():
        full_name = name + _SUFFIXES[implementation]
        AttentionInterface.register(full_name, partial(attention, implementation=implementation))
        AttentionMaskInterface.register(full_name, stock_mask if mask is None else partial(mask, stock_mask=stock_mask))


def registered_name(name: str, model: nn.Module) -> str:
    """Return the name under which an attention function is registered for a model's implementation."""
    return name + _SUFFIXES[chosen_attention(model)]


@dataclass(frozen=True)
class StockAttention:
    """Attention of a module as transformers computes it.

    Attributes:
        implementation: Name of the implementation.
        module: The attention module.
        scaling: Scaling factor as the module passes it.
        dropout: Dropout probability.
        keywords: Further keywords that the module passes, all of them known to `check_keywords`.
    """

    implementation: str
    module: nn.Module
    scaling: float | None
    dropout: float
    keywords: Mapping[str, Any]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention.

        Args:
            query: `[B, H_q, n, d]`.
            key, value: `[B, H, S, d]` and `[B, H, S, d_v]`.
            mask: As transformers makes it for the implementation: `[B, 1, n, S]`, or `[B, S]` for flash attention.

        Returns:
            `[B, n, H_q, d_v]`.

        Raises:
            UserError: The implementation does not support the module.
        """
        if self.implementation == EAGER:
            return self._eager(query, key, value, mask)
        if self.implementation == FLASH:
            return self._flash(query, key, value, mask)
        scale = logit_scale(query, self.scaling, self.keywords)
        if isinstance(scale, LogitScale):  # transformers' function would ignore the cap and the sinks
            is_causal = mask is None and query.shape[2] > 1
            output = dense_attention(query, key, value, mask, scale, is_causal=is_causal)
            return output.transpose(1, 2).contiguous()
        sdpa_result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            self.module, query, key, value, mask, scaling=self.scaling, dropout=self.dropout, **self.keywords
        )
        return sdpa_result[0]

    def _eager(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        module_code: Any = inspect.unwrap(type(self.module).forward)
        eager_attention = module_code.__globals__.get("eager_attention_forward")
        if eager_attention is None:
            raise UserError(f"{family_of(self.module)} has no eager attention function; use --attn auto")
        options = {**self.keywords, "dropout": self.dropout}
        if self.scaling is not None:
            options["scaling"] = self.scaling
        output: Tensor = eager_attention(self.module, query, key, value, mask, **options)[0]
        return output

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.keywords.get("s_aux") is not None:  # transformers drops them silently
            raise UserError(
                f"{family_of(self.module)} attention has sinks, which FlashAttention 2 does not support; "
                "use --attn auto or eager"
            )
        key_dim, value_dim = query.shape[-1], value.shape[-1]
        if value_dim != key_dim:  # the kernel needs equal sizes
            value = F.pad(value, (0, key_dim - value_dim))
        # Not the registered function, which reads the implementation's name from the configuration.
        output: Tensor = _flash_attention_forward(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            query_length=query.shape[2],
            is_causal=True,
            dropout=self.dropout,
            softmax_scale=self.scaling,
            sliding_window=self.keywords.get("sliding_window"),
            softcap=self.keywords.get("softcap"),
            use_top_left_mask=flash_attn_supports_top_left_mask(),
            target_dtype=get_target_dtype(query, self.module),
            attn_implementation=FLASH,
        )
        return output[..., :value_dim]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as the addend that eager attention takes."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
