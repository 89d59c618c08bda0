"""Checks of loaded model weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kvbench.errors import UserError

_SHOWN = 3
"""Maximum number of tensor names in an error message."""


def check_weights(model_name: str, model: nn.Module, report: Any, quantised: str) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's, or contain NaN or infinity.

    Tied weights are stored once and do not count as missing. A quantised checkpoint may hold tensors that only its
    quantizer reads.

    Raises:
        UserError: Some tensors are wrong; the message names the first few.
    """
    key_problems = {"missing_keys": "lacks weights of the model"}
    if not quantised:
        key_problems["unexpected_keys"] = "holds weights that the model does not have"
        key_problems["mismatched_keys"] = "holds weights of another shape than the model's"
    for tensor_key, problem in key_problems.items():
        wrong_names = sorted(
            wrong_item if isinstance(wrong_item, str) else wrong_item[0] for wrong_item in report.get(tensor_key) or ()
        )
        if wrong_names:
            raise UserError(f"model {model_name}: the checkpoint {problem}: {_listed(wrong_names)}")
    broken_names = [tensor_key for tensor_key, tensor in model.state_dict().items() if not _finite(tensor)]
    if broken_names:
        raise UserError(f"model {model_name}: weights are NaN or infinite: {_listed(broken_names)}")


def _finite(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return True
    if not tensor.is_floating_point() or tensor.element_size() < 2:  # integers; float8 has separate scales
        return True
    if type(tensor) not in (torch.Tensor, nn.Parameter):  # a quantised tensor of torchao
        tensor = tensor.dequantize()
    return bool(torch.isfinite(tensor).all())


def _listed(tensor_names: Iterable[str]) -> str:
    listed_names = list(tensor_names)
    rest_text = f" and {len(listed_names) - _SHOWN} more" if len(listed_names) > _SHOWN else ""
    return ", ".join(listed_names[:_SHOWN]) + rest_text
