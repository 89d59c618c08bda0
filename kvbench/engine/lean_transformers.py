"""Makes the import of transformers cheaper: by about a second of CPU in every process.

* transformers reads all files of its models, twice, for the names that each one exports. The names are kept in the
  cache, with a digest of the state of these files.
* Its table of losses imports those of object detection, CTC and others, and scipy with them. They are imported when one
  is called. The losses of language models are defined beside the table.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from kvbench.engine import import_hook
from kvbench.files import cache_dir, digest_of, state_of, stored_json

_LOSSES = "transformers.loss"
_STRUCTURE = "transformers.utils.import_utils"

Structure: TypeAlias = dict[str | frozenset[str], Any]
"""What `create_import_structure_from_path` returns: names by module by required packages, and subfolders."""


def install() -> None:
    """Make a later import of transformers cheaper; nothing is imported now."""
    import_hook.at_import(_STRUCTURE, _execute_structure)
    import_hook.at_import(f"{_LOSSES}.loss_utils", _execute_losses)


# --- names of models ------------------------------------------------------------------------------


def _execute_structure(loader: Loader, module: Any) -> None:
    loader.exec_module(module)
    read_files: Callable[[str | Path], Structure] | None = getattr(module, "create_import_structure_from_path", None)
    if read_files is None:  # another version, whose import is slower but works
        return
    reader_path = Path(module.__file__)
    models_folder = reader_path.parents[1] / "models"

    def stored(module_path: str | Path) -> Structure:
        if Path(module_path) in (models_folder, models_folder / "__init__.py"):
            with suppress(Exception):  # whatever is wrong with the cache, transformers can be imported
                return _stored(reader_path, models_folder, read_files)
        return read_files(module_path)

    module.create_import_structure_from_path = stored


def _stored(reader_path: Path, models_folder: Path, read_files: Callable[[str | Path], Structure]) -> Structure:
    """Return the names of all models from the cache; read the files if one has changed."""
    state = _state(reader_path, models_folder)

    def decode(content: Any) -> Structure:
        structure = _decode(content["structure"])
        if content["state"] != state or not structure:
            raise ValueError("of other files, or damaged")
        return structure

    return stored_json(
        cache_dir() / f"transformers-{digest_of(str(models_folder))}.json",
        lambda: {"state": state, "structure": _encode(read_files(models_folder))},
        decode,
    )


@functools.cache
def _state(reader_path: Path, models_folder: Path) -> str:
    """Return a digest of the state of all Python files of models, and of the module that reads them."""
    file_paths = [reader_path]
    for folder, _, file_names in os.walk(models_folder):
        file_paths += [Path(folder, file_name) for file_name in file_names if file_name.endswith(".py")]
    return digest_of(sorted((str(file_path), *state_of(file_path)) for file_path in file_paths))


def _encode(structure: Structure) -> dict[str, Any]:
    """Return a structure as a JSON value; exports, whose keys are sets, are listed under an empty name."""
    exports = [
        [sorted(packages), {module_name: sorted(names) for module_name, names in modules.items()}]
        for packages, modules in structure.items()
        if not isinstance(packages, str)
    ]
    return {"": exports} | {folder: _encode(inner) for folder, inner in structure.items() if isinstance(folder, str)}


def _decode(content: dict[str, Any]) -> Structure:
    exports: Structure = {
        frozenset(packages): {module_name: set(names) for module_name, names in modules.items()}
        for packages, modules in content[""]
    }
    return exports | {folder: _decode(inner) for folder, inner in content.items() if folder}


# --- losses ---------------------------------------------------------------------------------------


class _Deferred(ModuleType):
    """Stands for a module of losses: what is imported from it is a function that imports the module when called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def loss(*arguments: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), name)(*arguments, **options)

        return loss


def _execute_losses(loader: Loader, module: ModuleType) -> None:
    """Execute the table of losses beside stand-ins, which later imports do not see.

    A thread that imports one of these modules meanwhile would see them; transformers is imported before threads start.
    """
    names = {f"{_LOSSES}.{file_path.stem}" for file_path in Path(str(module.__file__)).parent.glob("loss_*.py")}
    stand_ins = {name: _Deferred(name) for name in names - {module.__name__} - sys.modules.keys()}
    sys.modules.update(stand_ins)
    try:
        try:
            loader.exec_module(module)
        finally:
            for name in stand_ins:
                del sys.modules[name]
    except Exception:  # another version, which needs more of a loss than to list it
        loader.exec_module(module)
