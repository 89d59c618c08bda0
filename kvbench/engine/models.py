"""Facts about a model that the engine needs: decoder, attention modules and shapes."""

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
    """Return the text decoder: the module that holds the layers, without vision towers."""
    decoder = model.model if hasattr(model, "model") else model
    decoder = decoder.language_model if hasattr(decoder, "language_model") else decoder
    if not hasattr(decoder, "layers"):
        raise UserError(f"kvbench cannot find the decoder layers of {type(model).__name__}")
    return decoder


def full_layer_ids(model: nn.Module) -> list[int]:
    """Return the `layer_idx` of the full-attention layers, from which entries are evicted."""
    layers = DynamicCache(config=decoder_of(model).config).layers
    return [layer_id for layer_id, layer in enumerate(layers) if type(layer) is DynamicLayer]


def attention_modules(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Return the attention modules of the full-attention layers, each with its index among them.

    Raises:
        UserError: A layer has no attention module where kvbench looks for it.
    """
    decoder, modules = decoder_of(model), []
    for layer_index, layer in enumerate(full_layer_ids(model)):
        module = getattr(decoder.layers[layer], "self_attn", None)
        if not isinstance(module, nn.Module):
            raise UserError(
                f"kvbench cannot find the attention of {type(model).__name__}: layer {layer} has no self_attn"
            )
        modules.append((layer_index, module))
    return modules


def model_info(model: nn.Module) -> ModelInfo:
    """Return the shapes and projections of a model.

    Raises:
        UserError: The model has no full-attention layer, so there is nothing to evict.
    """
    modules = [module for _, module in attention_modules(model)]
    config: Any = decoder_of(model).config
    if not modules:
        raise UserError(f"{type(model).__name__} has only sliding-window layers: there is nothing to evict")
    parameter_dtypes = (
        parameter.dtype for parameter in decoder_of(model).parameters() if parameter.is_floating_point()
    )
    dtype = next(parameter_dtypes, torch.float32)
    query_heads = _size(model, "num_attention_heads")
    kv_heads, hidden_size = _size(model, "num_key_value_heads"), _size(model, "hidden_size")
    head_dim = _size(model, "head_dim", default=hidden_size // query_heads)
    embedding: Any = getattr(decoder_of(model), "rotary_emb", None)
    layer_kinds: list[str] | None = None
    if embedding is not None and "layer_type" in inspect.signature(embedding.forward).parameters:
        layer_kinds = [config.layer_types[layer_id] for layer_id in full_layer_ids(model)]  # each kind has its own

    def output_weight(layer: int) -> Tensor:
        attention_module: Any = modules[layer]
        weight = plain_weight(attention_module.o_proj, query_heads * int(head_dim), dtype)
        # A copy, because a policy that writes to it must not change the model.
        return weight.clone().view(weight.shape[0], query_heads, int(head_dim)).permute(1, 2, 0)

    def project(layer: int, hidden: Tensor) -> Tensor:
        attention_module: Any = modules[layer]
        if hasattr(attention_module, "qkv_proj"):  # Phi-3
            joint: Tensor = attention_module.qkv_proj(hidden)
            return joint
        return torch.cat(
            [
                projection(hidden)
                for projection in (
                    attention_module.q_proj,
                    attention_module.k_proj,
                    attention_module.v_proj,
                )
            ],
            -1,
        )

    def rotary(layer: int, position: Tensor) -> tuple[Tensor, Tensor]:
        if embedding is None:
            raise UserError(f"{type(model).__name__} has no rotary embedding, which the policy reads")
        reference = torch.empty(0, device=position.device)
        layer_kind = () if layer_kinds is None else (layer_kinds[layer],)
        cos, sin = embedding(reference, position[None], *layer_kind)
        return cos[0].to(position.device), sin[0].to(position.device)

    has_projections = _has(modules, "qkv_proj") or _has(modules, "q_proj", "k_proj", "v_proj")
    return ModelInfo(
        name=str(getattr(config, "_name_or_path", "")) or type(model).__name__,
        layers=len(modules),
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=int(head_dim),
        hidden_size=hidden_size,
        output_weight=output_weight if _has(modules, "o_proj") else _without(model, "o_proj"),
        project=project if has_projections else _without(model, "q_proj, k_proj and v_proj"),
        rotary=rotary,
    )


def _size(model: nn.Module, field: str, default: int | None = None) -> int:
    """Read a size shared by all layers from a model's configuration.

    Raises:
        UserError: The configuration has no such size, or one for each kind of layer.
    """
    config: Any = decoder_of(model).config
    try:
        size = getattr(config, field, None) or default
    except Exception:  # transformers raises its own error where layers differ
        size = None
    if not isinstance(size, int) or size < 1:
        raise UserError(f"{type(model).__name__} has no {field} that holds for all its layers, which kvbench needs")
    return size


def _has(modules: list[nn.Module], *names: str) -> bool:
    return all(hasattr(module, module_name) for module in modules for module_name in names)


def _without(model: nn.Module, names: str) -> Callable[..., Any]:
    """Return a `ModelInfo` function that refuses a model without the named projections."""

    def refuse(*_: Any) -> Any:
        raise UserError(f"the attention of {type(model).__name__} has no {names}, which the policy reads")

    return refuse


def head_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function that maps final hidden states to logits."""
    get_head = getattr(model, "get_output_embeddings", None)
    output_head = get_head() if get_head is not None else None
    soft_cap = getattr(decoder_of(model).config, "final_logit_softcapping", None)

    def compute_logits(hidden: Tensor) -> Tensor:
        if output_head is None:
            raise UserError(f"{type(model).__name__} has no language-model head, which surprisal needs")
        head_logits: Tensor = output_head(hidden)
        return head_logits if soft_cap is None else soft_cap * (head_logits / soft_cap).tanh()

    return compute_logits


def is_vision(config: Any) -> bool:
    """Return whether the configuration is that of a model that takes images."""
    return getattr(config, "vision_config", None) is not None


def visual_ids(model: nn.Module) -> tuple[int, ...]:
    """Return the ids of image and video tokens; empty for a text model."""
    config: Any = model.config
    if not is_vision(config):
        return ()
    field_names = ("image_token_id", "video_token_id")
    return tuple(
        int(token_id) for field_name in field_names if (token_id := getattr(config, field_name, None)) is not None
    )


def rotary_model(model: nn.Module) -> Any:
    """Return the module that assigns M-RoPE positions to images; None if there is none."""
    inner: Any = getattr(model, "model", model)
    return inner if hasattr(inner, "get_rope_index") else None


def devices_of(model: nn.Module) -> list[torch.device]:
    """Return the devices that hold a model, in layer order."""
    return list(dict.fromkeys(tensor.device for tensor in (*model.parameters(), *model.buffers())))


def check_single(model: nn.Module, what: str) -> None:
    """Refuse a model that spans several devices.

    Raises:
        UserError: The model is on more than one device.
    """
    devices = devices_of(model)
    if len(devices) > 1:
        raise UserError(
            f"{what} needs a model on one device, not spread over {', '.join(map(str, devices))}; "
            "use --quantization bnb-4bit or another --device-map"
        )
