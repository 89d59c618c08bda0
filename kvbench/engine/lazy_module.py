"""Gives a module of another package without executing it, until something of it is used that we do not give."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class LazyModule(MetaPathFinder, Loader):
    """Finds one module, with only `names` in it, and executes that same module when more of it is used.

    It is executed by an import of Python's, whose locks make other threads wait. Its own values then replace `names`.
    """

    def __init__(self, module_name: str, names: Mapping[str, Any]) -> None:
        self.module_name = module_name
        self.module = ModuleType(module_name)
        self.names = {**names, "__getattr__": self._look_up}
        self._loader: Loader | None = None
        self._lock = threading.Lock()
        self._is_started = False

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
            if not self._is_started:
                self._is_started = True
                self.before()
                sys.modules.pop(self.module_name, None)
        return importlib.import_module(self.module_name)

    def before(self) -> None:
        """Do what has to be done once, before the module is executed."""

    def after(self) -> None:
        """Do what has to be done once, after the module was executed."""

    # --- import -----------------------------------------------------------------------------------

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == self.module_name:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._loader, spec.loader = spec.loader, self
            return spec
        if name.startswith(f"{self.module_name}.") and not self._is_started:  # its package was found before
            self.execute()
            # Python would execute it again if it were there: `_Imported` puts it back.
            imported = sys.modules.pop(name, None)
            return None if imported is None else ModuleSpec(name, _Imported(imported))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        if not self._is_started:
            vars(module).update(self.names)
            return
        assert self._loader is not None and module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        for name in self.names.keys() - {"__getattr__"}:
            vars(module).pop(name, None)
        self._loader.exec_module(module)
        if vars(module).get("__getattr__") == self._look_up:
            del vars(module)["__getattr__"]
        self.after()

    def _look_up(self, name: str) -> Any:
        # Python asks any module for names such as __wrapped__; only these two are a module's own.
        if not name.startswith("__") or name in ("__all__", "__version__"):
            names = vars(self.execute())
            if name in names:
                return names[name]
        raise AttributeError(f"module {self.module_name!r} has no attribute {name!r}")


class _Imported(Loader):
    """Gives a module that the import of its package has imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec  # modules of settings refuse assignments
