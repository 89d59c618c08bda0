"""What the engine needs to know about a model: decoder, attention modules and shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvbench.engine.quantization import plain_weight
from kvbench.errors import UserError
from kvbench.view import ModelInfo


def decoder_of(model: nn.Module) -> Any:
    """The text decoder: the module that holds the layers, without vision towers."""
    inner = model.model if hasattr(model, "model") else model
    inner = inner.language_model if hasattr(inner, "language_model") else inner
    if not hasattr(inner, "layers"):
        raise UserError(f"kvbench cannot find the decoder layers of {type(model).__name__}")
    return inner


def full_layer_ids(model: nn.Module) -> list[int]:
    """`layer_idx` of the full-attention layers, from which entries are evicted."""
    layers = DynamicCache(config=decoder_of(model).config).layers
    return [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]


def attention_modules(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Attention modules of the full-attention layers, each with its index among these layers.

    Raises:
        UserError: A layer has none where kvbench looks for it.
    """
    decoder, modules = decoder_of(model), []
    for index, layer in enumerate(full_layer_ids(model)):
        module = getattr(decoder.layers[layer], "self_attn", None)
        if not isinstance(module, nn.Module):
            raise UserError(
                f"kvbench cannot find the attention of {type(model).__name__}: layer {layer} has "
                "no self_attn"
            )
        modules.append((index, module))
    return modules


def model_info(model: nn.Module) -> ModelInfo:
    """Shapes and output projections of a model.

    Raises:
        UserError: The model has no full-attention layer, so there is nothing to evict.
    """
    modules = [module for _, module in attention_modules(model)]
    config: Any = decoder_of(model).config
    if not modules:
        raise UserError(
            f"{type(model).__name__} has only sliding-window layers: there is nothing to evict"
        )
    computes = (p.dtype for p in decoder_of(model).parameters() if p.is_floating_point())
    dtype = next(computes, torch.float32)
    query_heads = _size(model, "num_attention_heads")
    kv_heads, hidden_size = _size(model, "num_key_value_heads"), _size(model, "hidden_size")
    dim = _size(model, "head_dim", default=hidden_size // query_heads)
    embedding: Any = getattr(decoder_of(model), "rotary_emb", None)
    kinds: list[str] | None = None
    if embedding is not None and "layer_type" in inspect.signature(embedding.forward).parameters:
        kinds = [config.layer_types[i] for i in full_layer_ids(model)]  # each kind has its own

    def output_weight(layer: int) -> Tensor:
        attention: Any = modules[layer]
        weight = plain_weight(attention.o_proj, query_heads * int(dim), dtype)
        # A copy: a policy that writes to it must not change the model.
        return weight.clone().view(weight.shape[0], query_heads, int(dim)).permute(1, 2, 0)

    def project(layer: int, hidden: Tensor) -> Tensor:
        attention: Any = modules[layer]
        if hasattr(attention, "qkv_proj"):  # Phi-3
            joint: Tensor = attention.qkv_proj(hidden)
            return joint
        return torch.cat(
            [p(hidden) for p in (attention.q_proj, attention.k_proj, attention.v_proj)], -1
        )

    def rotary(layer: int, position: Tensor) -> tuple[Tensor, Tensor]:
        if embedding is None:
            raise UserError(
                f"{type(model).__name__} has no rotary embedding, which the policy reads"
            )
        like = torch.empty(0, device=position.device)
        kind = () if kinds is None else (kinds[layer],)
        cos, sin = embedding(like, position[None], *kind)
        return cos[0].to(position.device), sin[0].to(position.device)

    projects = _has(modules, "qkv_proj") or _has(modules, "q_proj", "k_proj", "v_proj")
    return ModelInfo(
        name=str(getattr(config, "_name_or_path", "")) or type(model).__name__,
        layers=len(modules),
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=int(dim),
        hidden_size=hidden_size,
        output_weight=output_weight if _has(modules, "o_proj") else _without(model, "o_proj"),
        project=project if projects else _without(model, "q_proj, k_proj and v_proj"),
        rotary=rotary,
    )


def _size(model: nn.Module, name: str, default: int | None = None) -> int:
    """Read a size that all layers of a model share from its configuration.

    Raises:
        UserError: The configuration has no such size, or one for each kind of layer.
    """
    config: Any = decoder_of(model).config
    try:
        size = getattr(config, name, None) or default
    except Exception:  # transformers raises an error of its own where layers differ
        size = None
    if not isinstance(size, int) or size < 1:
        raise UserError(
            f"{type(model).__name__} has no {name} that holds for all its layers, which kvbench "
            "needs"
        )
    return size


def _has(modules: list[nn.Module], *names: str) -> bool:
    return all(hasattr(module, name) for module in modules for name in names)


def _without(model: nn.Module, names: str) -> Callable[..., Any]:
    """A function of `ModelInfo` for a model without the projections that it reads."""

    def refuse(*_: Any) -> Any:
        raise UserError(
            f"the attention of {type(model).__name__} has no {names}, which the policy reads"
        )

    return refuse


def head_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function that turns final hidden states into logits."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    cap = getattr(decoder_of(model).config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        if head is None:
            raise UserError(
                f"{type(model).__name__} has no language-model head, which surprisal needs"
            )
        found: Tensor = head(hidden)
        return found if cap is None else cap * (found / cap).tanh()

    return logits


def is_vision(config: Any) -> bool:
    """Whether the configuration is that of a model that takes images."""
    return getattr(config, "vision_config", None) is not None


def visual_ids(model: nn.Module) -> tuple[int, ...]:
    """Ids of the tokens that images and videos take; empty for a text model."""
    config: Any = model.config
    if not is_vision(config):
        return ()
    names = ("image_token_id", "video_token_id")
    return tuple(int(i) for name in names if (i := getattr(config, name, None)) is not None)


def rotary_model(model: nn.Module) -> Any:
    """The module that gives images positions on several axes (M-RoPE); None if there is none."""
    inner: Any = getattr(model, "model", model)
    return inner if hasattr(inner, "get_rope_index") else None


def devices_of(model: nn.Module) -> list[torch.device]:
    """The devices that hold a model, in the order of its layers."""
    return list(dict.fromkeys(p.device for p in (*model.parameters(), *model.buffers())))


def check_single(model: nn.Module, what: str) -> None:
    """Refuse a model that is spread over several devices.

    Raises:
        UserError: The model is on more than one device.
    """
    found = devices_of(model)
    if len(found) > 1:
        raise UserError(
            f"{what} needs a model on one device, not spread over {', '.join(map(str, found))}; "
            "use --quantization bnb-4bit or another --device-map"
        )
