"""Facts about a model that the engine needs: decoder, attention modules and shapes."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer
from transformers.pytorch_utils import Conv1D

from kvbench.engine import latent
from kvbench.engine.contract import check_cache
from kvbench.engine.quantization import plain_weight
from kvbench.engine.rotation import rotation_forms
from kvbench.errors import UserError
from kvbench.view import ModelInfo

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "wo", "Wo", "c_proj", "output_linear")
"""Names that families give to the output projection of attention."""

_EVICTABLE = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
_DECODERS: WeakKeyDictionary[nn.Module, weakref.ref[Any]] = WeakKeyDictionary()


def is_attention(module: nn.Module) -> bool:
    """Return whether a module belongs to a layer of the cache and calls transformers' attention function."""
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "attention_interface" in code.co_varnames


def decoder_of(model: nn.Module) -> Any:
    """Return the text decoder: the smallest pretrained model that holds all its attention modules.

    Raises:
        UserError: No module uses transformers' attention interface.
    """
    if model not in _DECODERS:
        _DECODERS[model] = weakref.ref(_find_decoder(model))
    decoder = _DECODERS[model]()
    assert decoder is not None
    return decoder


def _find_decoder(model: Any) -> nn.Module:
    text_config = type(model.config.get_text_config(decoder=True))
    attention_names = [
        name
        for name, module in model.named_modules()
        if is_attention(module) and isinstance(getattr(module, "config", None), text_config)
    ]
    if not attention_names:
        raise UserError(
            f"{type(model).__name__} does not use transformers' attention interface, which kvbench needs; "
            "docs/models.md lists the supported families"
        )
    decoder: nn.Module = model
    for name, module in model.named_modules():
        holds_all = all(attention_name.startswith(f"{name}.") for attention_name in attention_names)
        if holds_all and isinstance(module, PreTrainedModel):
            decoder = module
    return decoder


def input_names(model: nn.Module) -> frozenset[str]:
    """Return the names of what a model's forward takes."""
    return _parameter_names(type(model).forward)


@functools.cache
def _parameter_names(forward_function: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward_function).parameters)


def cache_inputs(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the keywords that make a forward read a cache and extend it.

    transformers calls the cache `cache` from 5.24 on, and `past_key_values` before; remote code still says the latter.
    """
    return {"cache" if "cache" in input_names(model) else "past_key_values": cache, "use_cache": True}


def full_layer_ids(model: nn.Module) -> list[int]:
    """Return the `layer_idx` of the full-attention layers, from which entries are evicted."""
    layers = DynamicCache(config=decoder_of(model).config).layers
    return [layer_id for layer_id, layer in enumerate(layers) if type(layer) in _EVICTABLE]


def attention_modules(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Return the attention modules of the full-attention layers, each with its index among them.

    Raises:
        UserError: A layer has no attention module, or several.
    """
    modules: dict[int, list[nn.Module]] = {}
    for module in decoder_of(model).modules():
        if is_attention(module) and not is_reading(module) and "cross" not in type(module).__name__.lower():
            modules.setdefault(int(module.layer_idx), []).append(module)
    layer_ids = full_layer_ids(model)
    for layer_id in layer_ids:
        if (module_count := len(modules.get(layer_id, ()))) != 1:
            raise UserError(
                f"layer {layer_id} of {type(model).__name__} has {module_count} modules with transformers' attention "
                "interface, but kvbench needs exactly one"
            )
    return [(layer_index, modules[layer_id][0]) for layer_index, layer_id in enumerate(layer_ids)]


def is_reading(module: nn.Module) -> bool:
    """Return whether an attention module has no keys and values of its own but reads those of an earlier layer."""
    return bool(getattr(module, "is_kv_shared_layer", False))


def reading_modules(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Return the modules that read a full-attention layer's keys and values, each with the `layer_idx` of that layer.

    In Gemma 3n and Gemma 4 the last layers share those of the last layer of their kind that has its own.
    """
    decoder = decoder_of(model)
    layer_ids = full_layer_ids(model)
    layer_types = getattr(decoder.config, "layer_types", None) or []
    return [
        (layer_ids[-1], module)
        for module in decoder.modules()
        if is_attention(module) and is_reading(module) and layer_types[module.layer_idx] == "full_attention"
    ]


def output_projection(attention: nn.Module) -> nn.Module | None:
    """Return the output projection of an attention module; None if it has no known name."""
    for name in OUTPUT_PROJECTIONS:
        projection = getattr(attention, name, None)
        if isinstance(projection, nn.Module):
            return projection
    return None


def model_info(model: nn.Module) -> ModelInfo:
    """Return the shapes and projections of a model.

    Raises:
        UserError: The model has no full-attention layer, so there is nothing to evict, or needs a cache of its own.
    """
    modules = [module for _, module in attention_modules(model)]
    config: Any = decoder_of(model).config
    check_cache(config)
    is_mla = any(latent.is_latent(module) for module in modules)
    if not modules:
        raise UserError(f"{type(model).__name__} has only sliding-window layers: there is nothing to evict")
    parameter_dtypes = (
        parameter.dtype for parameter in decoder_of(model).parameters() if parameter.is_floating_point()
    )
    dtype = next(parameter_dtypes, torch.float32)
    shapes = {_shape(model, layer_id, module) for layer_id, module in zip(full_layer_ids(model), modules, strict=True)}
    if len(shapes) > 1:
        raise UserError(
            f"{type(model).__name__} has full-attention layers with different heads; kvbench needs equal ones"
        )
    query_heads, kv_heads, head_dim = shapes.pop()
    hidden_size = int(config.hidden_size)
    embedding: Any = getattr(decoder_of(model), "rotary_emb", None)
    layer_kinds: list[str] | None = None
    if embedding is not None and "layer_type" in inspect.signature(embedding.forward).parameters:
        layer_kinds = [config.layer_types[layer_id] for layer_id in full_layer_ids(model)]  # each kind has its own

    def output_weight(layer: int) -> Tensor:
        projection: Any = output_projection(modules[layer])
        input_count = int(getattr(projection, "in_features", 0)) or query_heads * head_dim
        weight = plain_weight(projection, input_count, dtype)
        if isinstance(projection, Conv1D):  # GPT-2 stores the transposed matrix
            weight = weight.T
        # A copy, because a policy that writes to it must not change the model.
        head_weights = weight.clone().view(weight.shape[0], query_heads, -1).permute(1, 2, 0)
        return latent.output_weight(modules[layer], head_weights) if is_mla else head_weights

    def project(layer: int, hidden: Tensor) -> Tensor:
        attention_module: Any = modules[layer]
        joint_projection = getattr(attention_module, "qkv_proj", None)  # Phi-3
        if joint_projection is not None:
            projected: Tensor = joint_projection(hidden)
        else:
            projections = attention_module.q_proj, attention_module.k_proj, attention_module.v_proj
            projected = torch.cat([projection(hidden) for projection in projections], -1)
        if projected.shape[-1] != (query_heads + 2 * kv_heads) * head_dim:
            raise UserError(f"the projections of {type(model).__name__} are not plain queries, keys and values")
        return projected

    def embed(layer: int, position: Tensor) -> tuple[Tensor, Tensor]:
        reference = torch.empty(0, device=position.device)
        layer_kind = () if layer_kinds is None else (layer_kinds[layer],)
        cos, sin = embedding(reference, position[None], *layer_kind)
        return cos[0].to(position.device), sin[0].to(position.device)

    def embed_short(layer: int, position: Tensor) -> tuple[Tensor, Tensor]:
        longest = _short_length(config, embedding, None if layer_kinds is None else layer_kinds[layer])
        if longest is not None and position.numel() and int(position.max()) >= longest:
            raise UserError(
                f"{type(model).__name__} rotates all keys otherwise once a text has more than {longest} tokens, "
                "which kvbench cannot undo, but the policy reads keys or queries before RoPE"
            )
        return embed(layer, position)

    def rotary(layer: int, position: Tensor) -> tuple[Tensor, Tensor]:
        if embedding is None:
            raise UserError(f"{type(model).__name__} has no rotary embedding, which the policy reads")
        form = rotation_forms(decoder_of(model), modules, embed)[layer]
        if form is None:
            raise UserError(
                f"{type(model).__name__} rotates keys in a way that kvbench cannot undo, "
                "but the policy reads keys or queries before RoPE"
            )
        return form(functools.partial(embed_short, layer), position)

    has_projections = _has(modules, "qkv_proj") or _has(modules, "q_proj", "k_proj", "v_proj")
    has_output = all(output_projection(module) is not None for module in modules)
    return ModelInfo(
        name=str(getattr(config, "_name_or_path", "")) or type(model).__name__,
        layers=len(modules),
        kv_heads=kv_heads,
        query_heads=query_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        output_weight=output_weight if has_output else _without(model, "output projection"),
        project=project if has_projections else _without(model, "q_proj, k_proj and v_proj"),
        rotary=_without(model, "rotary embedding of whole keys") if is_mla else rotary,
    )


def _short_length(config: Any, embedding: Any, layer_kind: str | None) -> int | None:
    """Return the length up to which an embedding ignores how long a text is; None if it always does.

    Beyond it, the cosines and sines of an entry depend on the text at the time it entered the cache.
    """
    parameters: Any = getattr(config, "rope_parameters", None)
    rope_type: Any = getattr(embedding, "rope_type", None)
    if isinstance(rope_type, dict):
        rope_type, parameters = rope_type.get(layer_kind), parameters.get(layer_kind)
    if rope_type == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(embedding.original_max_seq_len) if "dynamic" in str(rope_type) else None


def _shape(model: nn.Module, layer_id: int, attention: Any) -> tuple[int, int, int]:
    """Return the query heads, KV heads and channels of a key of one full-attention layer.

    Raises:
        UserError: The configuration has no number of heads.
    """
    config: Any = decoder_of(model).config
    if hasattr(config, "per_layer_config"):  # layers of one model can differ
        config = config.per_layer_config[layer_id]
    query_heads = getattr(config, "num_attention_heads", None)
    if not isinstance(query_heads, int) or query_heads < 1:
        raise UserError(f"{type(model).__name__} has no num_attention_heads, which kvbench needs")
    if latent.is_latent(attention):
        return query_heads, 1, latent.entry_dim(attention)
    # Not num_key_value_heads: configurations of families without grouped queries accept any.
    kv_heads = query_heads // (getattr(attention, "num_key_value_groups", None) or 1)
    head_dim = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
    return query_heads, kv_heads, int(head_dim or config.hidden_size // query_heads)


def _has(modules: list[nn.Module], *names: str) -> bool:
    return all(getattr(module, name, None) is not None for module in modules for name in names)


def _without(model: nn.Module, names: str) -> Callable[..., Any]:
    """Return a `ModelInfo` function that refuses a model without the named projections."""

    def refuse(*_: Any) -> Any:
        raise UserError(f"the attention of {type(model).__name__} has no {names}, which the policy reads")

    return refuse


def head_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function that maps final hidden states to logits."""
    get_head = getattr(model, "get_output_embeddings", None)
    output_head = get_head() if get_head is not None else None
    transform = getattr(model, "lm_head", None)
    if transform is output_head:
        transform = None  # ModernBERT alone has a `lm_head` before its output matrix
    config = decoder_of(model).config
    factor, soft_cap = _logit_factor(config), getattr(config, "final_logit_softcapping", None)

    def compute_logits(hidden: Tensor) -> Tensor:
        if output_head is None:
            raise UserError(f"{type(model).__name__} has no language-model head, which surprisal needs")
        head_logits: Tensor = output_head(hidden if transform is None else transform(hidden)) * factor
        return head_logits if soft_cap is None else soft_cap * (head_logits / soft_cap).tanh()

    return compute_logits


def _logit_factor(config: Any) -> float:
    """Return the factor by which some families multiply the outputs of their output matrix."""
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    factor *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
    scaling = getattr(config, "logits_scaling", None) or 1.0
    # Granite divides by what HyperCLOVA X multiplies by.
    return float(factor * scaling if config.model_type == "hyperclovax" else factor / scaling)


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
