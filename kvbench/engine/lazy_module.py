"""Gives a module of another package without executing it, until something of it is used that we do not give."""

from __future__ import annotations

import copy
import importlib
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from kvbench.engine.import_hook import restore_loader


class LazyModule(MetaPathFinder, Loader):
    """Finds one module, with only `names` in it, and executes that same module when more of it is used.

    It is executed by an import of Python's, whose locks make other threads wait. Its own values then replace `names`.
    """

    def __init__(self, module_name: str, names: Mapping[str, Any] | None = None) -> None:
        self.module_name = module_name
        self.module = ModuleType(module_name)
        self.names = {**(names or {}), "__getattr__": self.look_up}
        self.is_started = False
        self._loader: Any = None
        self._lock = threading.Lock()

    def install(self) -> None:
        """Have a later import find it; nothing is imported now, and a second call for a module does nothing."""
        if self.module_name in sys.modules:
            return
        if not any(
            isinstance(finder, LazyModule) and finder.module_name == self.module_name for finder in sys.meta_path
        ):
            sys.meta_path.insert(0, self)

    def execute(self) -> ModuleType:
        """Return the executed module."""
        with self._lock:
            if not self.is_started:
                self.is_started = True
                self.before()
                sys.modules.pop(self.module_name, None)
        return importlib.import_module(self.module_name)

    def before(self) -> None:
        """Do what has to be done once, before the module is executed."""

    def after(self) -> None:
        """Do what has to be done once, after the module was executed."""

    def look_up(self, name: str) -> Any:
        """Return what the module has under a name that is not there yet."""
        # Python asks any module for names such as __wrapped__; only these two are a module's own.
        if not name.startswith("__") or name in ("__all__", "__version__"):
            names = vars(self.execute())
            if name in names:
                return names[name]
        raise AttributeError(f"module {self.module_name!r} has no attribute {name!r}")

    # --- import -----------------------------------------------------------------------------------

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == self.module_name:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._loader, spec.loader = spec.loader, self
            return spec
        package_name, _, child_name = name.rpartition(".")
        if package_name == self.module_name and not self.is_started:  # Python had found its package before
            self.execute()
            imported = sys.modules.get(name)
            if imported is not None:  # Python would execute it again, by the loader of its own spec
                spec = copy.copy(imported.__spec__)
                assert spec is not None
                spec.loader = _Imported(imported, self.module, child_name)
                vars(imported)["__spec__"] = spec  # modules of settings refuse assignments
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        if not self.is_started:
            vars(module).update(self.names)
            return
        restore_loader(module, self._loader)
        for name in self.names.keys() - {"__getattr__"}:
            vars(module).pop(name, None)
        self._loader.exec_module(module)
        if vars(module).get("__getattr__") == self.look_up:
            del vars(module)["__getattr__"]
        self.after()

    def __getattr__(self, name: str) -> Any:
        """Return what else the module's own loader has, such as what reads its source and other files."""
        return _of_loader(vars(self).get("_loader"), name)


class _Imported(Loader):
    """Gives a module that the import of its package has imported, and leaves both as they are."""

    def __init__(self, module: ModuleType, package: ModuleType, child_name: str) -> None:
        self._module, self._package, self._child_name = module, package, child_name
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec
        if vars(self._package).get(self._child_name) is not module:  # such as a function of the same name
            self._package.__class__ = _Complete

    def __getattr__(self, name: str) -> Any:
        spec = vars(self).get("_spec")
        return _of_loader(spec and spec.loader, name)


class _Complete(ModuleType):
    """Ignores the attribute that Python sets after it has imported a module of a package."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "__class__", ModuleType)


def _of_loader(loader: Any, name: str) -> Any:
    if loader is None or name.startswith("__"):
        raise AttributeError(name)
    return getattr(loader, name)
