"""Old names of moved modules, so that `import kvbench.recipes.items` still works."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "kvbench.bench": "kvbench.analysis.speed",
    "kvbench.layouts": "kvbench.papers.layouts",
    "kvbench.published": "kvbench.papers.published",
    "kvbench.published.figures": "kvbench.papers.published.results",
    "kvbench.recipes": "kvbench.papers.recipes",
    "kvbench.report.write": "kvbench.report.rendering",
}
"""New names by old name, of modules and whole packages."""


class _Moved(MetaPathFinder, Loader):
    """Import hook that returns the moved module itself, not a copy, under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("kvbench."):
            return None
        package = next((old for old in _LONGEST_FIRST if f"{fullname}.".startswith(f"{old}.")), "")
        if not package:
            return None
        new_name = MOVED[package] + fullname.removeprefix(package)
        return ModuleSpec(fullname, self, origin=new_name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it


_LONGEST_FIRST = sorted(MOVED, key=len, reverse=True)


def install() -> None:
    """Make the old names importable."""
    sys.meta_path.insert(0, _Moved())  # before the finder that would load a second copy
