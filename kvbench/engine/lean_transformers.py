"""Makes the import of transformers cheaper: by about a second of CPU in every process.

* transformers reads all files of its models, twice, for the names that each one exports. The names are kept in the
  cache, with a digest of the state of these files.
* Its table of losses imports those of object detection, CTC and others, and scipy with them. They are imported when one
  is called. The losses of language models are defined beside the table.
* `torch.distributed.tensor`, which spreads a model over processes, is left out of a command that is one process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from kvbench.engine import import_hook
from kvbench.files import cache_dir, digest_of, state_of, stored_json

_LOSSES = "transformers.loss"
_UTILS = "transformers.utils.import_utils"

Structure: TypeAlias = dict[str | frozenset[str], Any]
"""What `create_import_structure_from_path` returns: names by module by required packages, and subfolders."""

_with_shards = True


def install() -> None:
    """Make a later import of transformers cheaper; nothing is imported now."""
    import_hook.at_import(_UTILS, _execute_utils)
    import_hook.at_import(f"{_LOSSES}.loss_utils", _execute_losses)


def without_shards() -> None:
    """Have a later import of transformers leave out what spreads a model over processes."""
    global _with_shards
    _with_shards = False


# --- names of models ------------------------------------------------------------------------------


def _execute_utils(loader: Loader, module: Any) -> None:
    loader.exec_module(module)
    if not _with_shards:
        module.is_torch_distributed_available = lambda: False
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


def _execute_losses(loader: Loader, module: ModuleType) -> None:
    names = {f"{_LOSSES}.{file_path.stem}" for file_path in Path(str(module.__file__)).parent.glob("loss_*.py")}
    import_hook.execute_beside(names - {module.__name__}, loader, module)
