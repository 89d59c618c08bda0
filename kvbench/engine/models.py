"""What the engine needs of a model: its decoder, its attention modules, its shapes; and loading."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvbench.engine.quantization import plain_weight, scheme_config
from kvbench.errors import UserError, nearest
from kvbench.plugin import ModelInfo
from kvbench.quantization import check

REFERENCE = "reference"


def decoder_of(model: nn.Module) -> Any:
    """The text decoder: the module that holds the layers (vision towers stay as they are)."""
    inner = model.model if hasattr(model, "model") else model
    inner = inner.language_model if hasattr(inner, "language_model") else inner
    if not hasattr(inner, "layers"):
        raise UserError(f"{type(model).__name__} has no decoder layers that kvbench can find")
    return inner


def full_layer_ids(model: nn.Module) -> list[int]:
    """`layer_idx` of the full-attention layers, the ones that are evicted from."""
    layers = DynamicCache(config=decoder_of(model).config).layers
    return [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]


def attention_modules(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """Attention modules of the full-attention layers, each with its index among them."""
    decoder = decoder_of(model)
    return [(i, decoder.layers[idx].self_attn) for i, idx in enumerate(full_layer_ids(model))]


def model_info(model: nn.Module) -> ModelInfo:
    """Shapes and output projections of a model.

    Raises:
        UserError: It has no full-attention layer, so there is nothing to evict.
    """
    modules = [module for _, module in attention_modules(model)]
    config: Any = decoder_of(model).config
    if not modules:
        raise UserError(
            f"{type(model).__name__} has no full-attention layer (all slide): nothing to evict"
        )
    computes = (p.dtype for p in decoder_of(model).parameters() if p.is_floating_point())
    dtype = next(computes, torch.float32)
    query_heads = int(config.num_attention_heads)
    dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads

    def output_weight(layer: int) -> Tensor:
        attention: Any = modules[layer]
        weight = plain_weight(attention.o_proj, query_heads * int(dim), dtype)
        return weight.view(weight.shape[0], query_heads, int(dim)).permute(1, 2, 0)

    def project(layer: int, hidden: Tensor) -> Tensor:
        attention: Any = modules[layer]
        if hasattr(attention, "qkv_proj"):  # Phi-3
            joint: Tensor = attention.qkv_proj(hidden)
            return joint
        return torch.cat(
            [p(hidden) for p in (attention.q_proj, attention.k_proj, attention.v_proj)], -1
        )

    return ModelInfo(
        name=str(getattr(config, "_name_or_path", "")) or type(model).__name__,
        layers=len(modules),
        kv_heads=int(config.num_key_value_heads),
        query_heads=query_heads,
        head_dim=int(dim),
        hidden_size=int(config.hidden_size),
        output_weight=output_weight,
        project=project,
    )


def head_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Give what turns final hidden states into logits."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    cap = getattr(decoder_of(model).config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        if head is None:
            raise UserError(f"{type(model).__name__} has no language-model head: no surprisal")
        found: Tensor = head(hidden)
        return found if cap is None else cap * (found / cap).tanh()

    return logits


def resolve_model(name: str) -> str:
    """Give what transformers can load: the shipped reference model's folder, a path, a hub id.

    Raises:
        UserError: A path that does not exist or holds no config.json.
    """
    if name == REFERENCE:
        from kvbench import reference

        if not (reference.path() / "config.json").is_file():
            raise UserError(f"model reference: its files are missing from {reference.path()}")
        return str(reference.path())
    path = Path(name).expanduser()
    repository, mark, revision = name.partition("@")
    if mark and not path.is_dir():
        raise UserError(f"model {name}: --model {repository} --revision {revision} would be right")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model {name}: no config.json in that folder")
        return str(path)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local or name.count("/") != 1:
        raise UserError(
            f"model {name}: no such folder{nearest(name, [REFERENCE])}; reference, a local folder "
            "or a hub id (organisation/name) would be right"
        )
    return name


def pick_device(device: str, device_map: object = None) -> torch.device:
    """`auto` is a GPU where there is one, else the CPU; of a device map it is the first device."""
    if isinstance(device_map, Mapping):
        first = next(iter(device_map.values()))
        device = f"cuda:{first}" if isinstance(first, int) else str(first)
    if device != "auto":
        try:
            return torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0].split(". ")[0][:120]
            raise UserError(f"device {device} cannot be used here: {reason}") from None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU and bfloat16 on a GPU."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in known:
        raise UserError(f"dtype {dtype}: auto, {', '.join(known)} would be right")
    return known[dtype]


def load_config(name: str, revision: str | None = None) -> Any:
    """Load a model's configuration without its weights.

    Raises:
        UserError: It is not there, with the reason in one line.
    """
    from transformers import AutoConfig

    return _load(AutoConfig, name, revision)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Load a tokenizer, padding on the left."""
    from transformers import AutoTokenizer

    return _load(AutoTokenizer, name, revision, padding_side="left")


def load_model(
    name: str,
    revision: str | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    device_map: str | Mapping[str, Any] | None = None,
    quantization: str | None = None,
) -> nn.Module:
    """Load a causal language model for inference (never remote code, never pickled weights).

    Args:
        name: `reference`, a folder or a hub id.
        revision: Of the hub.
        device: Where it goes, unless a device map says so.
        dtype: Of what is not quantised, and of the cache.
        device_map: As transformers takes it: `auto`, or module names to devices.
        quantization: One of `kvbench.quantization.PACKAGES`, for weights that are not quantised
            on disk.

    Raises:
        UserError: It cannot be loaded, or not as is wished.
    """
    from transformers import AutoModelForCausalLM

    more: dict[str, Any] = {}
    if check(name, load_config(name, revision), quantization, device_map):
        more["device_map"] = {"": device}  # what is quantised cannot always be moved
    if quantization is not None:
        more["quantization_config"] = scheme_config(quantization, dtype)
    if device_map is not None:
        more["device_map"] = device_map if isinstance(device_map, str) else dict(device_map)
    model: nn.Module = _load(
        AutoModelForCausalLM,
        name,
        revision,
        dtype=dtype,
        use_safetensors=True,
        attn_implementation="sdpa",
        **more,
    )
    if not more:
        model = model.to(device)
    _check_memory(name, model)
    return model.eval().requires_grad_(False)


def devices_of(model: nn.Module) -> list[torch.device]:
    """The devices that a model lies on, its first layers' first."""
    return list(dict.fromkeys(p.device for p in (*model.parameters(), *model.buffers())))


def check_single(model: nn.Module, what: str) -> None:
    """Refuse a model that is spread over several devices.

    Raises:
        UserError: It is.
    """
    found = devices_of(model)
    if len(found) > 1:
        raise UserError(
            f"{what} needs a model on one device, not spread over {', '.join(map(str, found))}; "
            "--quantization bnb-4bit or another --device-map would be right"
        )


def _check_memory(name: str, model: nn.Module) -> None:
    """Refuse a model of which a part is fetched from elsewhere at every step.

    Raises:
        UserError: It is.
    """
    away = {str(d) for d in getattr(model, "hf_device_map", {}).values() if d in ("cpu", "disk")}
    if "disk" in away or any(device.type == "meta" for device in devices_of(model)):
        raise UserError(
            f"model {name} does not fit into the memory of the devices, and a part of it would be "
            f"fetched from {' and '.join(sorted(away)) or 'disk'} at every step; "
            "--quantization bnb-4bit, a smaller model or more GPUs would be right"
        )


def _load(kind: Any, name: str, revision: str | None, **kwargs: Any) -> Any:
    source = resolve_model(name)
    try:
        return kind.from_pretrained(source, revision=revision, **kwargs)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = next((s for s in str(error).splitlines() if s.strip()), type(error).__name__)
        offline = os.environ.get("HF_HUB_OFFLINE") == "1" and not Path(source).is_dir()
        hint = " (HF_HUB_OFFLINE=1 is set and it is not in the local cache)" if offline else ""
        raise UserError(f"model {name} cannot be loaded{hint}: {reason}") from None
