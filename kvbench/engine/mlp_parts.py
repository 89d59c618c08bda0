"""Feed-forward layers that take a prompt a few hundred tokens at a time.

A gated MLP makes three tensors of `intermediate_size` channels for all tokens of a prompt at once. Where the cells of a
grid share a prefill, these are its largest tensors. It computes every token alone, so parts of the tokens give the same
output with tensors of a part's size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

_CPU_TOKENS = 512
"""Tokens of a part on a CPU: smaller parts cost the reference model some percent of an MLP."""
_DEVICE_TOKENS = 4096
"""Tokens of a part elsewhere: enough to fill a GPU."""
_FORWARD = "forward"


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module is a gated MLP whose weights are in memory as they are used.

    Others are left alone: coded or offloaded weights would be decoded or moved once for every part.
    """
    children = dict(module.named_children())
    expands = {"gate_proj", "up_proj"} <= children.keys() or "gate_up_proj" in children
    if not (expands and "down_proj" in children and type(module).__name__.endswith("MLP")):
        return False
    linear = [child for name, child in children.items() if name.endswith("_proj")]
    if any(type(child) is not nn.Linear or _FORWARD in child.__dict__ for child in linear):
        return False
    return _FORWARD not in module.__dict__ and len(inspect.signature(module.forward).parameters) == 1


def takes_parts(module: nn.Module) -> bool:
    """Return whether a module is an MLP that runs in parts, or would inside the engine."""
    forward = module.__dict__.get(_FORWARD)
    return is_gated_mlp(module) or (isinstance(forward, partial) and forward.func is in_parts)


def part_count(token_count: int, device: torch.device) -> int:
    """Return in how many parts an MLP takes tokens; their lengths differ by at most one."""
    return -(-token_count // (_CPU_TOKENS if device.type == "cpu" else _DEVICE_TOKENS))


def in_parts(whole: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Run an MLP on parts of the tokens.

    Args:
        whole: Forward of the MLP.
        hidden: Inputs, `[..., channels]`.

    Returns:
        What `whole` returns for all tokens, `[..., channels]`.
    """
    parts = part_count(math.prod(hidden.shape[:-1]), hidden.device)
    if parts <= 1:
        return whole(hidden)
    outputs = [whole(part) for part in hidden.flatten(0, -2).tensor_split(parts)]
    output: Tensor = torch.cat(outputs).unflatten(0, hidden.shape[:-1])
    return output


@dataclass(frozen=True)
class SplitMlp:
    """An MLP that runs in parts until it is removed, like the handle of a hook."""

    module: nn.Module

    def remove(self) -> None:
        """Restore the MLP."""
        self.module.__dict__.pop(_FORWARD, None)


def split_mlps(decoder: nn.Module) -> list[SplitMlp]:
    """Let the gated MLPs of a text decoder run in parts; return a handle for each."""
    modules = [module for module in decoder.modules() if is_gated_mlp(module)]
    for module in modules:
        module.__dict__[_FORWARD] = partial(in_parts, module.forward)
    return [SplitMlp(module) for module in modules]
