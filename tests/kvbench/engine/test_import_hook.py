"""A module that we execute ourselves has its own loader afterwards."""

from __future__ import annotations

import importlib
import importlib.resources
import pkgutil
import sys
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType

import pytest

from kvbench.engine import import_hook


def test_files_of_a_package_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_path = tmp_path / "hooked_package"
    package_path.mkdir()
    (package_path / "__init__.py").write_text("answer = 42")
    (package_path / "note.txt").write_text("read me")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    def execute(loader: Loader, module: ModuleType) -> None:
        loader.exec_module(module)
        vars(module)["answer"] += 1

    import_hook.at_import("hooked_package", execute)
    module = importlib.import_module("hooked_package")
    assert module.answer == 43
    assert importlib.resources.files(module).joinpath("note.txt").read_text() == "read me"
    assert pkgutil.get_data("hooked_package", "note.txt") == b"read me"
