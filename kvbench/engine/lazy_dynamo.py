"""Executes `torch._dynamo`, torch's compiler, when something of it is used: other processes save half a second of CPU.

transformers, torchvision and torch itself import it to mark functions, to be compiled as a whole or not at all. Marks
can wait for `torch.compile`, or whatever else uses more of it: before that, nothing is compiled.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

from kvbench.engine import import_hook

_NAME = "torch._dynamo"

_USERS = {
    "transformers.masking_utils": f"{_NAME}._trace_wrapped_higher_order_op",
    "torchvision.ops.roi_align": f"{_NAME}.utils",
}
"""Modules that import functions of a part of it, which they call for masks, and regions, of their own."""


def install() -> None:
    """Have a later import of `torch._dynamo` execute nothing until it is used."""
    if _NAME in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    for user, part in _USERS.items():
        import_hook.at_import(user, functools.partial(finder.execute_user, part))


class _Finder(MetaPathFinder, Loader):
    """Gives the module with only what marks functions, and executes that same module when more is used.

    It is executed by an import of Python's, whose locks make other threads wait.
    """

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._module = ModuleType(_NAME)
        self._marks: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._is_started = self._is_executed = False
        self._names: dict[str, Callable[..., Any]] = {
            "__getattr__": self._look_up,
            "allow_in_graph": functools.partial(self._mark, "allow_in_graph"),
            "assume_constant_result": functools.partial(self._mark, "assume_constant_result"),
            "disable": self._disable,
        }

    # --- import -----------------------------------------------------------------------------------

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _NAME:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._loader, spec.loader = spec.loader, self
            return spec
        if name.startswith(f"{_NAME}.") and not self._is_started:  # its package was found before
            self._execute()
            # Python would execute it again if it were there: `_Imported` puts it back.
            imported = sys.modules.pop(name, None)
            return None if imported is None else ModuleSpec(name, _Imported(imported))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        if not self._is_started:
            vars(module).update(self._names)
            return
        assert self._loader is not None
        for name in self._names.keys() - {"__getattr__"}:
            vars(module).pop(name, None)
        self._loader.exec_module(module)
        if vars(module).get("__getattr__") == self._look_up:
            del vars(module)["__getattr__"]
        self._is_executed = True
        self._apply_marks()

    def execute_user(self, part: str, loader: Loader, module: ModuleType) -> None:
        """Execute `module` with functions that import `part` when they are called, until the compiler is there."""
        import_hook.execute_beside([part], loader, module)

        def replace() -> None:
            for name, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value.__module__ == part:
                    setattr(module, name, getattr(importlib.import_module(part), value.__name__))

        self._later(replace)

    def _execute(self) -> ModuleType:
        with self._lock:
            if not self._is_started:
                self._is_started = True
                for part in _USERS.values():
                    if isinstance(sys.modules.get(part), import_hook.Deferred):
                        del sys.modules[part]
                sys.modules.pop(_NAME, None)
        return importlib.import_module(_NAME)

    def _look_up(self, name: str) -> Any:
        if not name.startswith("__"):
            names = vars(self._execute())
            if name in names:
                return names[name]
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")

    # --- marks ------------------------------------------------------------------------------------

    def _apply_marks(self) -> None:
        while True:
            try:
                mark = self._marks.popleft()
            except IndexError:  # another thread may take the last one
                return
            mark()

    def _later(self, mark: Callable[[], object]) -> None:
        self._marks.append(mark)
        if self._is_executed:  # by another thread, perhaps after it has applied the marks
            self._apply_marks()

    def _mark(self, name: str, function: Any) -> Any:
        """Return `function`, as torch does, which marks the function itself."""
        self._later(lambda: getattr(self._module, name)(function))
        return function

    def _disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return what calls `fn`, and has what torch's wrapper has once functions can be compiled."""
        if fn is None:
            return functools.partial(self._disable, recursive=recursive, **options)
        if not isinstance(fn, FunctionType):  # such as a class, whose methods torch would replace
            return self._execute().disable(fn, recursive, **options)
        wrapped = fn

        @functools.wraps(fn)
        def call(*arguments: Any, **named: Any) -> Any:
            return wrapped(*arguments, **named)

        def mark() -> None:
            nonlocal wrapped
            wrapped = self._module.disable(fn, recursive, **options)
            vars(call).update(vars(wrapped), _torchdynamo_wrapper_id=id(call))

        self._later(mark)
        return call


class _Imported(Loader):
    """Gives a module that the import of its package has imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._spec  # modules of settings refuse assignments
