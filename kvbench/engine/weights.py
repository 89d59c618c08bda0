"""Checks of the weights that were loaded into a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from kvbench.errors import UserError

_SHOWN = 3
"""Names of tensors that an error message shows at most."""


def check_weights(name: str, model: nn.Module, report: Any, quantised: str) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's, or hold NaN or infinity.

    Tied weights are stored once and are not missing. A quantised checkpoint can hold tensors that
    only its quantiser reads.

    Raises:
        UserError: Some tensors are wrong; the message names the first few.
    """
    kinds = {"missing_keys": "lacks weights of the model"}
    if not quantised:
        kinds["unexpected_keys"] = "holds weights that the model does not have"
        kinds["mismatched_keys"] = "holds weights of another shape than the model's"
    for key, text in kinds.items():
        wrong = sorted(w if isinstance(w, str) else w[0] for w in report.get(key) or ())
        if wrong:
            raise UserError(f"model {name}: the checkpoint {text}: {_listed(wrong)}")
    broken = [key for key, x in model.state_dict().items() if not _finite(x)]
    if broken:
        raise UserError(f"model {name}: weights are NaN or infinite: {_listed(broken)}")


def _finite(x: object) -> bool:
    if not isinstance(x, torch.Tensor) or x.device.type == "meta":
        return True
    if not x.is_floating_point() or x.element_size() < 2:  # integers; float8 has separate scales
        return True
    return bool(torch.isfinite(x).all())


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
