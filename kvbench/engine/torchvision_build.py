"""Workaround for a torchvision built for another torch, such as a CUDA build beside a CPU torch.

Its import raises "operator torchvision::nms does not exist". transformers imports torchvision where it is installed,
and then fails for text models as well. The missing operators are about boxes in images, which no model here uses. They
are therefore declared without an implementation and the import is retried: text models work, and so do torchvision's
transforms of images and videos.
"""

from __future__ import annotations

import re
import sys
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from kvbench.engine import import_hook

_MISSING = re.compile(r"operator torchvision::\w+ does not exist")
_OPERATORS = ("nms", "qnms")
_library: Any = None  # the declarations live as long as this object


def _execute(loader: Loader, module: ModuleType) -> None:
    """Execute torchvision, a second time if its operators are missing."""
    try:
        loader.exec_module(module)
    except RuntimeError as error:
        if not _MISSING.search(str(error)):
            raise
        _declare()
        for module_name in [module_name for module_name in sys.modules if module_name.startswith("torchvision.")]:
            del sys.modules[module_name]
        loader.exec_module(module)


def _declare() -> None:
    global _library
    import torch

    # A fragment, because a module imported before kvbench may have declared some of them.
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for operator_name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, operator_name):
            _library.define(f"{operator_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def install() -> None:
    """Make a later import of torchvision succeed; nothing is imported now."""
    import_hook.at_import("torchvision", _execute)
