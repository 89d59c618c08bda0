"""Workaround for a torchvision built for another torch, such as a CUDA build beside a CPU torch.

Its import raises "operator torchvision::nms does not exist". transformers imports torchvision where it is installed,
and then fails for text models as well. The missing operators are about boxes in images, which no model here uses. They
are therefore declared without an implementation and the import is retried: text models work, and so do torchvision's
transforms of images and videos.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MISSING = re.compile(r"operator torchvision::\w+ does not exist")
_OPERATORS = ("nms", "qnms")


class _Retry(Loader):
    """Executes torchvision, a second time if its operators are missing."""

    _library: Any = None  # the declarations live as long as this object

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if not _MISSING.search(str(error)):
                raise
            self._declare()
            for module_name in [module_name for module_name in sys.modules if module_name.startswith("torchvision.")]:
                del sys.modules[module_name]
            self._loader.exec_module(module)

    @classmethod
    def _declare(cls) -> None:
        import torch

        # A fragment, because a module imported before kvbench may have declared some of them.
        cls._library = torch.library.Library("torchvision", "FRAGMENT")
        for operator_name in _OPERATORS:
            if not hasattr(torch.ops.torchvision, operator_name):
                cls._library.define(f"{operator_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _Finder(MetaPathFinder):
    """Finds torchvision; leaves every other module to Python."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Retry(spec.loader)
        return spec


def install() -> None:
    """Make a later import of torchvision succeed; nothing is imported now."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
