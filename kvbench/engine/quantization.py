"""Quantised weights: schemes, their configurations for transformers, and dequantised matrices."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from kvbench.engine.weight_schemes import PACKAGES
from kvbench.errors import UserError, reason_of


def method_of(config: Any) -> str:
    """Return the quantisation method of a model on disk, such as `gptq`; "" if it is not quantised."""
    for config_part in (config, config.get_text_config()):
        weight_config = getattr(config_part, "quantization_config", None)
        if weight_config:
            get_field = weight_config.get if isinstance(weight_config, Mapping) else vars(weight_config).get
            method = get_field("quant_method") or "unknown"
            return str(getattr(method, "value", method))
    return ""


def check_quantization(model_name: str, config: Any, scheme: str | None, device_map: object) -> str:
    """Check, before any computation, that a model can be loaded with these options.

    Args:
        scheme: Scheme that quantises it at loading; None: no scheme.
        device_map: Placement on several devices; None: a single device.

    Returns:
        Quantisation method of the loaded weights; "" if they are not quantised.

    Raises:
        UserError: The model is quantised already, or a package is missing.
    """
    method = method_of(config)
    if scheme and method:
        raise UserError(f"model {model_name} is quantised already ({method}); leave out --quantization {scheme}")
    option_text = f"--quantization {scheme}" if scheme else "--device-map"
    if method and not scheme and device_map is None:
        option_text = f"model {model_name} ({method})"
    required_packages = [PACKAGES[scheme]] if scheme else []
    required_packages += ["accelerate"] if scheme or method or device_map is not None else []
    missing = [package for package in required_packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"{option_text} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return scheme or method


def quantization_packages(scheme: str | None) -> tuple[str, ...]:
    """Return the packages whose versions can change a response."""
    return () if scheme is None else (PACKAGES[scheme],)


def scheme_config(scheme: str, dtype: torch.dtype) -> Any:
    """Return the quantisation configuration that transformers needs for a scheme.

    Args:
        scheme: One of `PACKAGES`.
        dtype: Dtype of the computation.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports every cast
    if scheme == "bnb-4bit":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    if scheme == "bnb-8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    torchao: Any = importlib.import_module("torchao.quantization")
    return transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())


@torch.no_grad()
def plain_weight(module: nn.Module, input_count: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix that a linear layer multiplies by, in a floating dtype.

    A plain weight is returned unchanged. Weights of bitsandbytes, torchao and quanto are dequantised by their
    libraries. Any other layer is applied to the unit vectors, which gives the same matrix.

    Args:
        module: A linear layer.
        input_count: Its number of inputs.
        dtype: Dtype of its computation.

    Returns:
        `[outputs, inputs]`.

    Raises:
        UserError: The layer cannot be dequantised.
    """
    stored_weight: Any = getattr(module, "weight", None)
    weight_type = type(stored_weight)
    matrix: Tensor
    if weight_type in (Tensor, nn.Parameter):
        # Float8 and packed weights have separate scales.
        if stored_weight.is_floating_point() and stored_weight.element_size() > 1 and stored_weight.dim() == 2:
            matrix = stored_weight
            return matrix
    elif getattr(getattr(stored_weight, "quant_state", None), "packing_format_for_cpu", False):
        # The first forward on a CPU with AVX-512 reorders the weight, which transformers would dequantise wrongly.
        return _probed(module, input_count, dtype)
    elif weight_type.__name__ in ("Params4bit", "Int8Params"):
        from transformers.integrations.bitsandbytes import dequantize_bnb_weight

        matrix = dequantize_bnb_weight(stored_weight, getattr(module, "state", None))
        return matrix.to(dtype)
    elif isinstance(stored_weight, Tensor) and stored_weight.dim() == 2:
        matrix = stored_weight.dequantize()
        return matrix.to(dtype)
    return _probed(module, input_count, dtype)


def _probed(module: nn.Module, input_count: int, dtype: torch.dtype) -> Tensor:
    device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)
    try:
        matrix: Tensor = module(torch.eye(input_count, dtype=dtype, device=device)[None])[0]
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            matrix = matrix - bias
    except Exception as error:
        reason = reason_of(error)
        raise UserError(
            f"the weights of {type(module).__name__} cannot be dequantised ({reason}); "
            "policies that need the output projection cannot run on this model"
        ) from error
    return matrix.transpose(0, 1)
