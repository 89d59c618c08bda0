"""Several devices, played on a CPU: every tensor has a label, and mixing labels raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from kvbench.engine import model_check
from kvbench.engine.kernels import launch
from kvbench.engine.models import decoder_of

_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_CPU = torch.device("cpu")
_ANYWHERE = {"copy_", "tolist", "item", "_has_compatible_shallow_copy_type"}
_ON_CPU = {"numpy", "__array__"}
_INDEXED = {"__getitem__", "__setitem__"}


def label(x: Tensor) -> torch.device:
    """Where a tensor is said to be."""
    return getattr(x, "_played", _CPU)


def put(x: Any, device: torch.device) -> Any:
    """Say where a tensor is."""
    if isinstance(x, Tensor):
        x._played = torch.device("cuda:0") if device == torch.device("cuda") else device  # type: ignore[attr-defined]
    return x


class Devices(TorchFunctionMode):
    """Within it `Tensor.device`, `Tensor.is_cuda`, `Tensor.to` and `device=` go by the labels, and so do errors."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == _DEVICE:
            return label(args[0])
        if func == _IS_CUDA:
            return label(args[0]).type == "cuda"
        wanted = None
        if kwargs.get("device") is not None:
            wanted, kwargs["device"] = torch.device(kwargs["device"]), _CPU
        if name in ("to", "cpu"):
            return _moved(func, name, args, kwargs, wanted)
        if name == "__set__" and isinstance(args[-1], Tensor):  # a parameter's data
            func(*args, **kwargs)
            return put(args[0], label(args[-1]))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        indices = [id(x) for x in tree_leaves(args[1])] if name in _INDEXED else []
        found = []
        for x in tensors:
            home = label(x)
            # Single numbers, and indices, may come from the CPU.
            if home == _CPU and (x.dim() == 0 or id(x) in indices):
                continue
            if home not in found:
                found.append(home)
        if len(found) > 1 and name not in _ANYWHERE:
            raise RuntimeError(f"{name}: tensors on {', '.join(map(str, found))}")
        if name in _ON_CPU and found and found[0] != _CPU:
            raise TypeError(f"{name}: a tensor on {found[0]}")
        out = func(*args, **kwargs)
        if isinstance(out, torch.Size):  # tree_map would make it a tuple
            return out
        home = wanted or (found[0] if found else _CPU)
        return tree_map(lambda x: put(x, home), out)


def _moved(
    func: Callable[..., Tensor],
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    wanted: torch.device | None,
) -> Any:
    """A tensor on another device, as a copy."""
    source, own = label(args[0]), list(args)
    if name == "cpu":
        wanted = _CPU
    for i, x in enumerate(args[1:], 1):
        if isinstance(x, torch.device | str):
            wanted, own[i] = torch.device(x), _CPU
    out = func(*own, **kwargs)
    home = wanted or source
    return put(out.clone() if out is args[0] and home != source else out, home)


@contextmanager
def gpu() -> Iterator[None]:
    """Within it `cuda:0` is a device of 80 GB for which Triton has no kernels. What is tested on it is not stored."""
    properties = SimpleNamespace(name="a GPU", total_memory=80 << 30)
    state = torch.zeros(1, dtype=torch.uint8)
    random = {"get_rng_state": lambda *_: state, "set_rng_state": lambda *_: None}
    silent = ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device")
    answers = {
        **{name: lambda *_: None for name in silent},
        **random,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (70 << 30, properties.total_memory),
        "max_memory_allocated": lambda *_: 1 << 30,
        "device": lambda *_: nullcontext(),
        "device_of": lambda *_: nullcontext(),
    }
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.multiple(torch.cuda.random, **random),
        mock.patch.object(launch, "_uses_triton", return_value=False),
        mock.patch.object(model_check, "_store"),
        Devices(),
    ):
        yield


def spread(model: Any, devices: Sequence[str]) -> None:
    """Lay a model's layers over devices, as accelerate does: each fetches what it is given."""
    decoder = decoder_of(model)
    count = len(decoder.layers)
    first, *_, last = (torch.device(devices[i]) for i in (0, 0, -1))
    tied = model.lm_head.weight is decoder.embed_tokens.weight
    homes = [torch.device(devices[i * len(devices) // count]) for i in range(count)]
    places = list(zip(decoder.layers, homes, strict=True))
    places += [(decoder.norm, last), (model.lm_head, first if tied else last)]
    places += [(child, first) for name, child in decoder.named_children() if name not in ("layers", "norm")]
    for module, device in places:
        for x in (*module.parameters(), *module.buffers()):
            put(x, device)
        module.register_forward_pre_hook(_fetching(device), with_kwargs=True)


def _fetching(device: torch.device) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        def near(x: Any) -> Any:
            return x.to(device) if hasattr(x, "to") else x  # as `accelerate.utils.send_to_device`

        own = {k: v if k == "past_key_values" else tree_map(near, v) for k, v in kwargs.items()}
        return tree_map(near, args), own

    return hook
