"""Runs our own function where Python would execute a module, for the modules of other packages that need it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeAlias

Execute: TypeAlias = Callable[[Loader, ModuleType], None]
"""Executes a module by its own loader, and does what is to be done around it."""


def restore_loader(module: ModuleType, loader: Loader) -> None:
    """Give a module its own loader, which also reads the files of its package."""
    assert module.__spec__ is not None
    module.__spec__.loader = module.__loader__ = loader


class _Wrapped(Loader):
    def __init__(self, loader: Loader, execute: Execute) -> None:
        self._loader = loader
        self._execute = execute

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        restore_loader(module, self._loader)
        self._execute(self._loader, module)


class _Finder(MetaPathFinder):
    """Finds one module; leaves every other module to Python."""

    def __init__(self, module_name: str, execute: Execute) -> None:
        self.module_name = module_name
        self._execute = execute

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == self.module_name else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapped(spec.loader, self._execute)
        return spec


def at_import(module_name: str, execute: Execute) -> None:
    """Have a later import of `module_name` call `execute`; nothing is imported now, and a second call does nothing."""
    if not any(isinstance(finder, _Finder) and finder.module_name == module_name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(module_name, execute))


class Deferred(ModuleType):
    """Stands for a module of functions and context managers: each imports the module when it is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*arguments: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*arguments, **options)

        function.__module__, function.__name__ = self.__name__, name
        return function


def execute_beside(names: Iterable[str], loader: Loader, module: ModuleType) -> None:
    """Execute `module`, which imports the modules `names` for what it calls later; they are imported when it does.

    Later imports see the real modules. A thread that imports one of them meanwhile would not; transformers and
    torchvision, which are executed so, are imported before threads start.
    """
    stand_ins = {name: Deferred(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        try:
            loader.exec_module(module)
        finally:
            for name, stand_in in stand_ins.items():
                if sys.modules.get(name) is stand_in:
                    del sys.modules[name]
    except Exception:  # another version, which needs more of them than to call it
        loader.exec_module(module)
