"""Loading of models and tokenizers. Never runs remote code, never reads pickles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.utils.import_utils import is_flash_attn_2_available

from kvbench.data.hub import unreachable
from kvbench.engine.gguf import converted, described
from kvbench.engine.implementations import EAGER, FLASH, SDPA, choose_attention
from kvbench.engine.model_check import Checked, check_model
from kvbench.engine.models import decoder_of, devices_of, is_vision
from kvbench.engine.quantization import check_quantization, scheme_config
from kvbench.engine.vision import QWEN, images_only
from kvbench.engine.weights import check_weights
from kvbench.errors import UserError, first_lines, out_of_memory
from kvbench.named import is_gguf, model_digest, resolve_model

_NO_IMPLEMENTATION = re.compile("does not support (an attention implementation|Flash Attention)")
"""Part of transformers' error for a family that lacks an attention implementation."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# --- device and dtype -----------------------------------------------------------------------------


def pick_device(device: str, device_map: object = None) -> torch.device:
    """Choose the device: `auto` is a GPU if there is one, else the CPU; for a device map, its first device.

    Raises:
        UserError: The device is not usable on this machine.
    """
    if isinstance(device_map, Mapping):
        first_device = next(iter(device_map.values()))
        device = f"cuda:{first_device}" if isinstance(first_device, int) else str(first_device)
    if device != "auto":
        try:
            return torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0].split(". ")[0][:120]
            raise UserError(f"device {device} cannot be used here: {reason}") from None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Choose the dtype: `auto` is float32 on the CPU and bfloat16 on a GPU."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def pick_attention(attn: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the attention implementation that is recorded: `auto` is SDPA, and eager in families without it.

    Raises:
        UserError: The implementation cannot be used here.
    """
    if attn == FLASH:
        if device.type != "cuda":
            raise UserError(f"--attn {FLASH} needs a GPU, not device {device.type}; use --attn sdpa")
        if dtype == torch.float32:
            raise UserError(f"--attn {FLASH} needs float16 or bfloat16, not float32; use --dtype bfloat16")
        if not is_flash_attn_2_available():
            raise UserError(
                f"--attn {FLASH} needs the package flash-attn; run pip install flash-attn, or use --attn sdpa"
            )
    return SDPA if attn == "auto" else attn


def dtype_label(dtype: torch.dtype, quantised: str) -> str:
    """Return a model's dtype as recorded, with the quantisation of its weights in brackets."""
    label = str(dtype).removeprefix("torch.")
    return f"{label} ({quantised})" if quantised else label


# --- loading --------------------------------------------------------------------------------------


def load_config(model_name: str, revision: str | None = None) -> Any:
    """Load a model's configuration without its weights.

    Raises:
        UserError: It cannot be loaded; the message is one line.
    """
    return read_model(AutoConfig, model_name, revision)


def model_revision(model_name: str, config: Any) -> str:
    """Return the digest of a local model, or the commit of a hub model; "" if neither is known."""
    return model_digest(model_name) or str(getattr(config, "_commit_hash", None) or "")


def load_tokenizer(model_name: str, revision: str | None = None) -> Any:
    """Load a tokenizer that pads on the left.

    Raises:
        UserError: The model has no tokenizer, or it cannot be loaded.
    """
    tokenizer = read_model(AutoTokenizer, model_name, revision, padding_side="left")
    try:
        token_ids = tokenizer("The quick brown fox", add_special_tokens=False)["input_ids"]
    except Exception as error:  # damaged settings are only read at first use
        raise UserError(f"model {model_name} cannot be loaded: its tokenizer: {_reason(error)}") from error
    if not token_ids:
        raise UserError(
            f"model {model_name} has no usable tokenizer: it turns text into no tokens; "
            "copy the tokenizer's files (tokenizer.json) into the model's folder"
        )
    return tokenizer


def load_model(
    model_name: str,
    revision: str | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    device_map: str | Mapping[str, Any] | None = None,
    quantization: str | None = None,
    attn: str = "auto",
    check: bool = True,
) -> nn.Module:
    """Load a causal or vision-language model for inference.

    Args:
        model_name: A named model, a folder, a GGUF file or a hub id.
        revision: Revision of a hub model.
        device: Target device, unless a device map is given.
        dtype: Dtype of everything that is not quantised, and of the cache.
        device_map: As in transformers: `auto`, or module names to devices.
        quantization: One of `kvbench.engine.weight_schemes.PACKAGES`, for weights that are not quantised on disk.
        attn: Attention of the prefill and of all that kvbench leaves to transformers; see `pick_attention`.
        check: Whether to compare its attention with transformers' own, unless it passed before; see `check_model`.

    Raises:
        UserError: The model cannot be loaded, its checkpoint is incomplete or damaged, or kvbench does not implement
            its attention.
    """
    load_options: dict[str, Any] = {}
    attention = pick_attention(attn, device, dtype)
    config = load_config(model_name, revision)
    quantised = check_quantization(model_name, config, quantization, device_map)
    if quantised:
        load_options["device_map"] = {"": device}  # quantised weights cannot always be moved
    else:
        load_options["ignore_mismatched_sizes"] = True  # so that check_weights can name the tensors
    if quantization is not None:
        load_options["quantization_config"] = scheme_config(quantization, dtype)
    if device_map is not None:
        load_options["device_map"] = device_map if isinstance(device_map, str) else dict(device_map)
    model, report = _read_weights(
        AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM,
        model_name,
        revision,
        attn,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        **load_options,
    )
    check_weights(model_name, model, report, quantised)
    if "device_map" not in load_options:
        model = model.to(device)
    _check_memory(model_name, model)
    if is_gguf(source := resolve_model(model_name)) or is_vision(config):
        decoder_of(model).config._name_or_path = source  # the key of its gates and profiles
    loaded_model: nn.Module = model.eval().requires_grad_(False)
    choose_attention(loaded_model, attention)
    if check:
        revision_digest = model_revision(model_name, config)
        check_model(loaded_model, Checked(revision_digest, dtype_label(dtype, quantised), device.type, attention))
    return loaded_model


def load_processor(model_name: str, revision: str | None, family: str, tokenizer: Any) -> Any:
    """Load the processor of a vision-language model.

    Without torchvision the processors of the Qwen-VL families read images but no videos.

    Args:
        model_name: A named model, a folder or a hub id.
        revision: Revision of a hub model.
        family: The `model_type` of its configuration.
        tokenizer: The model's tokenizer.

    Raises:
        UserError: It cannot be loaded.
    """
    # Processors import torchvision, which takes seconds and which text models do not need.
    from transformers import AutoImageProcessor, AutoProcessor

    try:
        processor = read_model(AutoProcessor, model_name, revision)
        processor.tokenizer = tokenizer
        return processor
    except UserError as error:
        if family not in QWEN or "orchvision" not in str(error):
            raise
    return images_only(family, read_model(AutoImageProcessor, model_name, revision), tokenizer)


def read_model(auto_class: Any, model_name: str, revision: str | None, **options: Any) -> Any:
    """Call `from_pretrained` of a transformers class.

    Raises:
        UserError: It fails; the message is one line.
    """
    source = _source(model_name, options.get("dtype"))
    hub_problem = "" if Path(source).is_dir() else unreachable()
    if hub_problem:  # otherwise the hub's client retries for half a minute, even if the cache holds the model
        options["local_files_only"] = True
    try:
        return auto_class.from_pretrained(source, revision=revision, **options)
    except Exception as error:  # damaged files can raise anything
        if out_of_memory(error):
            raise
        if hub_problem and isinstance(error, OSError):
            raise UserError(
                f"model {model_name} cannot be loaded: the local cache does not hold all of it, and the hub "
                f"{hub_problem}; use --model with a folder, or a name of kvbench list models"
            ) from error
        raise UserError(f"model {model_name} cannot be loaded: {_reason(error)}") from error


def _read_weights(auto_class: Any, model_name: str, revision: str | None, attn: str, **options: Any) -> Any:
    """Call `read_model` with an attention implementation.

    With `auto`, that is SDPA, or eager attention for families without SDPA (attention sinks or soft caps).

    Raises:
        UserError: As `read_model`, or the family lacks the implementation.
    """
    implementation = SDPA if attn == "auto" else attn
    try:
        return read_model(auto_class, model_name, revision, attn_implementation=implementation, **options)
    except UserError as error:
        if not _NO_IMPLEMENTATION.search(str(error.__cause__)):
            raise
        if attn != "auto":
            raise UserError(
                f"model {model_name}: transformers has no {attn} attention for this family; use --attn auto or eager"
            ) from None
    return read_model(auto_class, model_name, revision, attn_implementation=EAGER, **options)


def _reason(error: Exception) -> str:
    """Return why transformers cannot load a model, in fewer than 160 characters."""
    reason = first_lines(error)
    return reason if len(reason) < 160 else f"{reason[:156]}..."


def _source(model_name: str, dtype: torch.dtype | None) -> str:
    """Return the folder or hub id from which transformers loads a model.

    Args:
        model_name: The model as the user named it.
        dtype: Dtype of its weights; None if only configuration and tokenizer are needed.
    """
    source = resolve_model(model_name)
    if not is_gguf(source):
        return source
    gguf_path = Path(source)
    return str(described(model_name, gguf_path) if dtype is None else converted(model_name, gguf_path, dtype))


def _check_memory(name: str, model: nn.Module) -> None:
    """Refuse a model if part of it would be fetched from CPU memory or disk at every step.

    Raises:
        UserError: The model does not fit into the devices.
    """
    offloaded = {
        str(placement) for placement in getattr(model, "hf_device_map", {}).values() if placement in ("cpu", "disk")
    }
    if "disk" in offloaded or any(device.type == "meta" for device in devices_of(model)):
        raise UserError(
            f"model {name} does not fit into the memory of the devices; a part of it would be fetched from "
            f"{' and '.join(sorted(offloaded)) or 'disk'} at every step; "
            "use --quantization bnb-4bit, a smaller model or more GPUs"
        )
