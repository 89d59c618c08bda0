"""The contract with a model's attention: what kvbench computes itself and what it refuses.

transformers passes whatever a family adds to plain softmax attention (sinks, soft caps, biases) as keywords, and an
attention function that ignores one of them is silently wrong. Unlisted keywords are therefore refused. To support more,
compute it in `kvbench.engine.attachment` and `kvbench.engine.attend`, then add its keyword to `IMPLEMENTED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from kvbench.errors import UserError
from kvbench.view.softmax import LogitScale

IMPLEMENTED = frozenset({"s_aux", "sliding_window", "softcap"})
"""Keywords that change attention and that kvbench implements: sinks, soft caps, and windows through their mask."""

CAUSAL_FULL_LAYERS = frozenset({"gemma4_text"})
"""Families that make masks for images, and whose full layers are causal nevertheless."""

HARMLESS = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)
"""Keywords of a model's forward that reach attention functions but change no attention weight."""

OWN_CACHE = frozenset({"minimax"})
"""Families that accept no cache but an instance of their own class."""

_MEANINGS = {
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}


def family_of(module: nn.Module) -> str:
    """Return the model family's name for messages."""
    return str(getattr(getattr(module, "config", None), "model_type", type(module).__name__))


def check_keywords(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Refuse attention that receives a keyword kvbench does not implement.

    Args:
        keywords: Arguments of the attention function other than queries, keys, values, mask, scale and dropout. A
            keyword that is None or False changes nothing.

    Raises:
        UserError: A keyword is unknown; the message names it.
    """
    for keyword, argument in keywords.items():
        if argument is None or argument is False or keyword in HARMLESS or keyword in IMPLEMENTED:
            continue
        if keyword == "is_causal" and argument is True:
            continue
        meaning = f" ({_MEANINGS[keyword]})" if keyword in _MEANINGS else ""
        raise _refusal(module, f"passes {keyword}{meaning}")
    if keywords.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise _refusal(module, "is not causal")


def logit_scale(query: Tensor, scaling: float | None, keywords: Mapping[str, Any]) -> float:
    """Return the factor of the logits, with the soft cap and the sinks among an attention function's keywords."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cap, sinks = keywords.get("softcap"), keywords.get("s_aux")
    return scale if cap is None and sinks is None else LogitScale(scale, cap, sinks)


def check_attention(
    module: nn.Module,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keywords: Mapping[str, Any],
    cached: tuple[Tensor, Tensor] | None,
    *,
    is_latent: bool = False,
) -> None:
    """Refuse attention of a full layer over a ragged cache that is not plain softmax attention.

    Args:
        mask: Mask or bias passed by the module; kvbench's own mask of full layers is None.
        keywords: See `check_keywords`.
        cached: Keys and values that the cache returned to the module; None if it did not use the cache.
        is_latent: Whether the cache returned latents, which the module expands to `key` and `value`.

    Raises:
        UserError: kvbench does not implement this attention; the message gives the reason.
    """
    check_keywords(module, keywords)
    if mask is not None:
        raise _refusal(module, "makes an attention mask or bias of its own")
    if cached is None or not (is_latent or (key is cached[0] and value is cached[1])):
        raise _refusal(module, "changes keys or values between cache and attention")
    if keywords.get("sliding_window") is not None:
        raise _refusal(module, "has a sliding window in a layer that caches all tokens")


def check_cache(config: Any) -> None:
    """Refuse a model that accepts no other cache than its own.

    Raises:
        UserError: The family has a cache class of its own.
    """
    if config.model_type in OWN_CACHE:
        raise UserError(f"{config.model_type} needs a cache class of its own, which kvbench does not implement yet")


def check_mask(config: Any, mask_function: Callable[..., Any] | None) -> None:
    """Refuse full attention whose mask is not causal, such as one that is bidirectional within images.

    Raises:
        UserError: The mask is not causal.
    """
    if mask_function is not None and mask_function is not causal_mask_function:
        family = getattr(config, "model_type", "this model's")
        raise UserError(f"{family} attention uses a mask that is not causal, which kvbench does not implement yet")


def check_image_masks(decoder: nn.Module, is_first: bool) -> bool:
    """Return whether layers with a window let image tokens see later ones, for a forward with media.

    In Gemma 4 only these layers do, and nothing is evicted from them; in Gemma 3 full layers do as well.

    Args:
        is_first: Whether the forward is the first on its cache.

    Raises:
        UserError: kvbench does not implement the masks.
    """
    config: Any = decoder.config
    kind = getattr(config, "use_bidirectional_attention", None)
    if config.model_type not in CAUSAL_FULL_LAYERS or kind not in (None, "vision"):
        raise UserError(f"{family_of(decoder)} lets image tokens see later ones, which kvbench does not implement")
    if kind == "vision" and not is_first:
        raise UserError(f"{family_of(decoder)} cannot see images after its first tokens; put them first")
    return kind == "vision"


def check_consumed(module: nn.Module, pending: object) -> None:
    """Refuse attention that bypasses the configured attention function.

    Args:
        module: The attention module, after its forward.
        pending: New keys and values that no attention function has consumed.

    Raises:
        UserError: Pending keys and values are left.
    """
    if pending is not None:
        raise _refusal(module, "does not use transformers' attention interface")


def _refusal(module: nn.Module, behaviour: str) -> UserError:
    return UserError(f"{family_of(module)} attention {behaviour}, which kvbench does not implement yet")
