"""Detection of changes to shared tensors by checksum.

The version counters of tensors miss writes through `.data` and `.numpy()`; checksums of the contents catch all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvbench.engine.encoding import forget_encoded
from kvbench.errors import UserError

_WIDTH = 509
"""Columns of a checksum. The number is prime, so that swapped parts are detected."""


class _Watched(NamedTuple):
    """A tensor and its first checksum.

    Attributes:
        name: Name for messages.
        start: Its original memory address.
        table: See `_table`; None if the tensor is not contiguous and must be copied for it.
        first_sums: The first checksum.
    """

    name: str
    tensor: Tensor
    start: int
    table: tuple[Tensor, Tensor] | None
    first_sums: list[Tensor]

    def now(self) -> list[Tensor]:
        """Return the current checksum."""
        return _sums(*(_table(self.tensor) if self.table is None else self.table))


def versions(*tensors: Tensor) -> tuple[int, ...]:
    """Return the write counters of tensors; 0 (unknown) for tensors of inference mode."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def checksum(tensor: Tensor) -> Tensor:
    """Return sums over the bits of a tensor, int64.

    Integer sums are exact in any order, so an unchanged tensor always has the same checksum.
    """
    return torch.cat(_sums(*_table(tensor)))


def _table(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of a tensor as rows of 509 integers and a remainder; memory is shared if contiguous."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0:  # an expanded axis repeats the same memory
                tensor = tensor.narrow(axis, 0, min(1, tensor.shape[axis]))
    flat_tensor = tensor.contiguous().view(-1)
    item_bytes = flat_tensor.element_size()
    is_aligned = not (len(flat_tensor) * item_bytes % 8 or flat_tensor.storage_offset() * item_bytes % 8)
    bits = flat_tensor.view(torch.int64 if is_aligned else torch.uint8)
    table_size = len(bits) // _WIDTH * _WIDTH
    return bits[:table_size].view(-1, _WIDTH), bits[table_size:]


def _sums(table: Tensor, remainder: Tensor) -> list[Tensor]:
    return [table.sum(0), remainder.long()]


class Ledger:
    """Tensors used by several cells, with their original checksums."""

    def __init__(self) -> None:
        self._watched: dict[torch.device, list[_Watched]] = {}
        self._known: dict[Hashable, Tensor] = {}

    def add(self, tensor_name: str, tensor: Tensor) -> None:
        """Watch a tensor that no policy has been able to write to so far."""
        if tensor.device.type == "meta":  # accelerate keeps such weights elsewhere
            return
        if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight consists of several tensors
            for inner_name in tensor.__tensor_flatten__()[0]:
                self.add(tensor_name, getattr(tensor, inner_name))
            return
        table = _table(tensor)
        first_sums = [table[0].sum(0), table[1].to(torch.int64, copy=True)]
        shared_table = table if tensor.is_contiguous() else None
        watched = _Watched(tensor_name, tensor, tensor.data_ptr(), shared_table, first_sums)
        self._watched.setdefault(tensor.device, []).append(watched)

    def once(self, key: Hashable, tensor_name: str, make_tensor: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of a key, creating and watching it on first use."""
        if key not in self._known:
            self._known[key] = make_tensor()
            self.add(tensor_name, self._known[key])
        return self._known[key]

    def changed(self) -> str:
        """Return the name of a changed tensor, or ""; a GPU synchronises once."""
        for watched in self._watched.values():
            moved_names = (entry.name for entry in watched if entry.tensor.data_ptr() != entry.start)
            if moved_name := next(moved_names, ""):
                return moved_name
            current_sums = [column_sums for entry in watched for column_sums in entry.now()]
            first_sums = [column_sums for entry in watched for column_sums in entry.first_sums]
            if not torch.equal(torch.cat(current_sums), torch.cat(first_sums)):
                pairs = ((entry.name, zip(entry.now(), entry.first_sums, strict=True)) for entry in watched)
                return next(
                    tensor_name
                    for tensor_name, sum_pairs in pairs
                    if not all(current.equal(initial) for current, initial in sum_pairs)
                )
        return ""


class Weights:
    """The parameters and buffers of a model before any policy ran.

    Args:
        reload: Loads the same model again; None if that is not possible.
    """

    def __init__(self, model: nn.Module, reload: Callable[[], nn.Module] | None = None) -> None:
        self._model, self._reload = model, reload
        self._note()

    def _note(self) -> None:
        self._held, self._ledger = list(_weights(self._model)), Ledger()
        for tensor_name, module_tensors, tensor_key in self._held:
            self._ledger.add(tensor_name, module_tensors[tensor_key])
        self._tensors = [module_tensors[tensor_key] for _, module_tensors, tensor_key in self._held]

    def changed(self) -> str:
        """Return the name of a changed or replaced parameter, or ""."""
        for (tensor_name, module_tensors, tensor_key), tensor in zip(self._held, self._tensors, strict=True):
            if module_tensors.get(tensor_key) is not tensor:
                return tensor_name
        return self._ledger.changed()

    def restore(self, parameter_name: str) -> None:
        """Reload the model's parameters after a policy has changed some.

        Raises:
            UserError: They cannot be reloaded here.
        """
        if self._reload is None:
            raise UserError(f"a policy changed the model's parameter {parameter_name}; run without it")
        forget_encoded(self._model)
        for module in self._model.modules():  # free the memory for the copy
            for tensors in (module._parameters, module._buffers):
                tensors.update(dict.fromkeys(tensors))
        self._held, self._tensors, self._ledger = [], [], Ledger()
        for module_path, module in self._reload().named_modules():
            target_module: Any = self._model.get_submodule(module_path)
            target_module._parameters, target_module._buffers = module._parameters, module._buffers
        self._note()


def _weights(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield parameters and buffers: name, dictionary of the module, and key in it.

    Buffers that a forward itself updates are left out.
    """
    seen_ids = set()
    for module_path, module in model.named_modules():
        rope_type = str(getattr(module, "rope_type", ""))
        has_fixed_buffers = "dynamic" not in rope_type and "longrope" not in rope_type
        for module_tensors in (
            module._parameters,
            *([module._buffers] if has_fixed_buffers else []),
        ):
            for tensor_key, tensor in module_tensors.items():
                if tensor is not None and id(tensor) not in seen_ids:
                    seen_ids.add(id(tensor))
                    yield f"{module_path}.{tensor_key}".lstrip("."), module_tensors, tensor_key
