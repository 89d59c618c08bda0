"""Executes `torch._dynamo`, torch's compiler, when something of it is used: other processes save half a second of CPU.

transformers, torchvision and torch itself import it to mark functions, to be compiled as a whole or not at all. Marks
can wait for `torch.compile`, or whatever else uses more of it: before that, nothing is compiled.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import deque
from collections.abc import Callable
from importlib.abc import Loader
from types import FunctionType, ModuleType
from typing import Any

from kvbench.engine import import_hook
from kvbench.engine.lazy_module import LazyModule

_NAME = "torch._dynamo"

_USERS = {
    "transformers.masking_utils": f"{_NAME}._trace_wrapped_higher_order_op",
    "torchvision.ops.roi_align": f"{_NAME}.utils",
}
"""Modules that import functions of a part of it, which they call for masks, and regions, of their own."""


def install() -> None:
    """Have a later import of `torch._dynamo` execute nothing until it is used."""
    if _NAME in sys.modules:
        return
    compiler = _Compiler()
    compiler.install()
    for user, part in _USERS.items():
        import_hook.at_import(user, functools.partial(compiler.execute_user, part))


class _Compiler(LazyModule):
    """Gives what marks functions, and applies the marks when the compiler is executed."""

    def __init__(self) -> None:
        self._marks: deque[Callable[[], object]] = deque()
        self._is_executed = False
        functions = {
            "allow_in_graph": functools.partial(self._mark, "allow_in_graph"),
            "assume_constant_result": functools.partial(self._mark, "assume_constant_result"),
            "disable": self._disable,
        }
        super().__init__(_NAME, functions)

    def before(self) -> None:
        for part in _USERS.values():
            if isinstance(sys.modules.get(part), import_hook.Deferred):
                del sys.modules[part]

    def after(self) -> None:
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
        self._later(lambda: getattr(self.module, name)(function))
        return function

    def _disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return what calls `fn`, and has what torch's wrapper has once functions can be compiled."""
        if fn is None:
            return functools.partial(self._disable, recursive=recursive, **options)
        if not isinstance(fn, FunctionType):  # such as a class, whose methods torch would replace
            return self.execute().disable(fn, recursive, **options)
        wrapped = fn

        @functools.wraps(fn)
        def call(*arguments: Any, **named: Any) -> Any:
            return wrapped(*arguments, **named)

        def mark() -> None:
            nonlocal wrapped
            wrapped = self.module.disable(fn, recursive, **options)
            vars(call).update(vars(wrapped), _torchdynamo_wrapper_id=id(call))

        self._later(mark)
        return call
