"""Quantised weights: what transformers is told, and what a projection then multiplies by."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.errors import UserError


def scheme_config(scheme: str, dtype: torch.dtype) -> Any:
    """The configuration that transformers takes for a scheme.

    Args:
        scheme: One of `kvbench.quantization.PACKAGES`.
        dtype: What is computed in.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of every cast
    import transformers

    if scheme == "bnb-4bit":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    if scheme == "bnb-8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    torchao: Any = importlib.import_module("torchao.quantization")
    return transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())


@torch.no_grad()
def plain_weight(module: nn.Module, width: int, dtype: torch.dtype) -> Tensor:
    """The matrix that a linear layer multiplies by, as plain numbers.

    A plain weight is given as it is. bitsandbytes and the tensor classes of torchao and quanto
    dequantise their own. Of any other layer what it does to the unit vectors is taken, which is
    the same matrix.

    Args:
        module: A linear layer.
        width: Its inputs.
        dtype: What it computes in.

    Returns:
        `[outputs, inputs]`, in a floating dtype.

    Raises:
        UserError: The layer does not tell.
    """
    weight: Any = getattr(module, "weight", None)
    kind = type(weight)
    found: Tensor
    if kind in (Tensor, nn.Parameter):
        # A float8 or packed weight has scales beside it.
        if weight.is_floating_point() and weight.element_size() > 1 and weight.dim() == 2:
            found = weight
            return found
    elif kind.__name__ in ("Params4bit", "Int8Params"):
        from transformers.integrations.bitsandbytes import dequantize_bnb_weight

        found = dequantize_bnb_weight(weight, getattr(module, "state", None))
        return found.to(dtype)
    elif isinstance(weight, Tensor) and weight.dim() == 2:
        found = weight.dequantize()
        return found.to(dtype)
    return _probed(module, width, dtype)


def _probed(module: nn.Module, width: int, dtype: torch.dtype) -> Tensor:
    device = next((x.device for x in (*module.parameters(), *module.buffers())), None)
    try:
        out: Tensor = module(torch.eye(width, dtype=dtype, device=device)[None])[0]
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            out = out - bias
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"the weights of a {type(module).__name__} cannot be read as numbers ({reason}): "
            "policies that weigh values by the output projection, as criticalkv, cannot run"
        ) from error
    return out.transpose(0, 1)
