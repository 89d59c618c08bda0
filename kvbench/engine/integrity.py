"""Detects that a shared tensor has changed, whichever way it was written to.

Version counters of tensors miss writes through `.data` and `.numpy()`. Checksums of the contents
miss none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvbench.errors import UserError

_WIDTH = 509
"""Columns of a checksum. The number is prime, so that parts that change places are noticed."""


class _Watched(NamedTuple):
    """A tensor and its first checksum.

    Attributes:
        name: What it is called.
        tensor: The tensor.
        start: Where its memory began.
        table: See `_table`; None if the tensor is not contiguous and has to be copied for it.
        was: The checksum.
    """

    name: str
    tensor: Tensor
    start: int
    table: tuple[Tensor, Tensor] | None
    was: list[Tensor]

    def now(self) -> list[Tensor]:
        """The checksum as it is now."""
        return _sums(*(_table(self.tensor) if self.table is None else self.table))


def checksum(x: Tensor) -> Tensor:
    """Return sums over the bits of a tensor, int64.

    Sums of integers are exact in any order: an unchanged tensor always has the same checksum.
    """
    return torch.cat(_sums(*_table(x)))


def _table(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of a tensor as rows of 509 numbers and a rest; the same memory if contiguous."""
    x = x.detach()
    if not x.is_contiguous():
        for axis, stride in enumerate(x.stride()):
            if stride == 0:  # an expanded axis repeats the same memory
                x = x.narrow(axis, 0, min(1, x.shape[axis]))
    flat = x.contiguous().view(-1)
    size = flat.element_size()
    aligned = not (len(flat) * size % 8 or flat.storage_offset() * size % 8)
    bits = flat.view(torch.int64 if aligned else torch.uint8)
    whole = len(bits) // _WIDTH * _WIDTH
    return bits[:whole].view(-1, _WIDTH), bits[whole:]


def _sums(table: Tensor, rest: Tensor) -> list[Tensor]:
    return [table.sum(0), rest.long()]


class Ledger:
    """Tensors that several cells use, with the checksums that they had at first."""

    def __init__(self) -> None:
        self._watched: dict[torch.device, list[_Watched]] = {}
        self._known: dict[Hashable, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Watch a tensor that no policy has been able to write to so far."""
        if tensor.device.type == "meta":  # accelerate keeps such weights elsewhere
            return
        if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight consists of several tensors
            for part in tensor.__tensor_flatten__()[0]:
                self.add(name, getattr(tensor, part))
            return
        table = _table(tensor)
        was = [table[0].sum(0), table[1].to(torch.int64, copy=True)]
        shared = table if tensor.is_contiguous() else None
        watched = _Watched(name, tensor, tensor.data_ptr(), shared, was)
        self._watched.setdefault(tensor.device, []).append(watched)

    def once(self, key: Hashable, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of a key; it is made and watched the first time."""
        if key not in self._known:
            self._known[key] = make()
            self.add(name, self._known[key])
        return self._known[key]

    def changed(self) -> str:
        """Return the name of a tensor that has changed, or an empty string; a GPU waits once."""
        for watched in self._watched.values():
            moved = (w.name for w in watched if w.tensor.data_ptr() != w.start)
            if name := next(moved, ""):
                return name
            now = [part for w in watched for part in w.now()]
            was = [part for w in watched for part in w.was]
            if not torch.equal(torch.cat(now), torch.cat(was)):
                pairs = ((w.name, zip(w.now(), w.was, strict=True)) for w in watched)
                return next(n for n, sums in pairs if not all(a.equal(b) for a, b in sums))
        return ""


class Weights:
    """The parameters and buffers of a model, as they were before any policy ran.

    Args:
        model: The model.
        reload: Loads the same model again; None if that is not possible.
    """

    def __init__(self, model: nn.Module, reload: Callable[[], nn.Module] | None = None) -> None:
        self._model, self._reload = model, reload
        self._note()

    def _note(self) -> None:
        self._held, self._ledger = list(_weights(self._model)), Ledger()
        for name, held, key in self._held:
            self._ledger.add(name, held[key])
        self._tensors = [held[key] for _, held, key in self._held]

    def changed(self) -> str:
        """Return the name of a parameter that was changed or replaced, or an empty string."""
        for (name, held, key), tensor in zip(self._held, self._tensors, strict=True):
            if held.get(key) is not tensor:
                return name
        return self._ledger.changed()

    def restore(self, name: str) -> None:
        """Load the model's parameters again, after a policy has changed some.

        Args:
            name: The parameter that was changed.

        Raises:
            UserError: They cannot be loaded again here.
        """
        if self._reload is None:
            raise UserError(f"a policy changed the model's parameter {name}; run without it")
        for module in self._model.modules():  # free the memory for the copy
            for tensors in (module._parameters, module._buffers):
                tensors.update(dict.fromkeys(tensors))
        self._held, self._tensors, self._ledger = [], [], Ledger()
        for path, module in self._reload().named_modules():
            own: Any = self._model.get_submodule(path)
            own._parameters, own._buffers = module._parameters, module._buffers
        self._note()


def _weights(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Parameters and buffers, each with the dictionary of its module and its key in there.

    Buffers that a forward itself updates are left out.
    """
    seen = set()
    for path, module in model.named_modules():
        kind = str(getattr(module, "rope_type", ""))
        fixed = "dynamic" not in kind and "longrope" not in kind
        for held in (module._parameters, *([module._buffers] if fixed else [])):
            for key, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{path}.{key}".lstrip("."), held, key
