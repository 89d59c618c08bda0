"""Detects that a shared tensor has changed, whichever way it was written to.

Version counters of tensors miss writes through `.data` and `.numpy()`. Checksums of the contents
miss none.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvbench.errors import UserError

_WIDTH = 509
"""Columns of a checksum. The number is prime, so that parts that change places are noticed."""

_BLOCK = 16
"""Rows that are summed at once: a CPU reads large tensors fastest this way."""


def checksum(x: Tensor) -> Tensor:
    """Return sums over the bits of a tensor, int64 `[509]`.

    Sums of integers are exact in any order: an unchanged tensor always has the same checksum.
    """
    for axis, stride in enumerate(x.stride()):
        if stride == 0:  # an expanded axis repeats the same memory
            x = x.narrow(axis, 0, min(1, x.shape[axis]))
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # the bits cannot be read as int64 from there
        flat = flat.clone()
    size = 8 * _WIDTH * _BLOCK
    rest = len(flat) % size
    whole = flat[: len(flat) - rest].view(torch.int64)
    sums = whole.view(-1, _BLOCK, _WIDTH).sum(1).sum(0)
    if rest:
        sums += (
            pad(flat[len(flat) - rest :], (0, size - rest))
            .view(torch.int64)
            .view(_BLOCK, _WIDTH)
            .sum(0)
        )
    return sums


class Ledger:
    """Tensors that several cells use, with the checksums that they had at first."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Tensor, Tensor]] = []
        self._known: dict[Hashable, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Note a tensor before a policy can write to it."""
        if tensor.device.type == "meta":  # accelerate keeps such weights elsewhere
            return
        if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight consists of several tensors
            for part in tensor.__tensor_flatten__()[0]:
                self.add(name, getattr(tensor, part))
            return
        self._entries.append((name, tensor, checksum(tensor)))

    def once(self, key: Hashable, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of a key; it is made and noted the first time."""
        if key not in self._known:
            self._known[key] = make()
            self.add(name, self._known[key])
        return self._known[key]

    def changed(self) -> str:
        """Return the name of a tensor that has changed, or an empty string; a GPU waits once."""
        if not self._entries:
            return ""
        where = self._entries[0][1].device
        flags = [(checksum(x) != was).any().to(where) for _, x, was in self._entries]
        wrong = torch.stack(flags).tolist()
        return next((name for (name, *_), bad in zip(self._entries, wrong, strict=True) if bad), "")


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
        self._tensors, self._ledger = dict(_weights(self._model)), Ledger()
        for name, tensor in self._tensors.items():
            self._ledger.add(name, tensor)

    def changed(self) -> str:
        """Return the name of a parameter that was changed or replaced, or an empty string."""
        found = dict(_weights(self._model))
        names = {**self._tensors, **found}
        replaced = (n for n in names if found.get(n) is not self._tensors.get(n))
        return next(replaced, "") or self._ledger.changed()

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
        self._tensors, self._ledger = {}, Ledger()
        for path, module in self._reload().named_modules():
            own: Any = self._model.get_submodule(path)
            own._parameters, own._buffers = module._parameters, module._buffers
        self._note()


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, without the buffers that a forward itself updates."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        kind = str(getattr(module, "rope_type", ""))
        if "dynamic" not in kind and "longrope" not in kind:
            yield from module.named_buffers(path, recurse=False)
