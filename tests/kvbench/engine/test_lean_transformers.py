"""What `import transformers` leaves out: names come from the cache, and losses return what they return without us."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvbench.engine import lean_transformers

LOSSES = """
import sys
{first}
from transformers.loss.loss_utils import LOSS_MAPPING

imported = "transformers.loss.loss_for_object_detection" in sys.modules
import torch

logits = torch.linspace(-1, 1, 24).reshape(1, 6, 4)
losses = LOSS_MAPPING["ForCausalLM"](logits, torch.tensor([[0, 1, 2, 3, 0, 1]]), vocab_size=4).item(), len(LOSS_MAPPING)
config = type("Config", (), {{"class_cost": 1, "bbox_cost": 5, "giou_cost": 2, "num_labels": 3, "eos_coefficient": 0.1,
    "bbox_loss_coefficient": 5, "giou_loss_coefficient": 2, "auxiliary_loss": False}})
boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.4]]])
labels = [{{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.2]])}}]
loss, parts, _ = LOSS_MAPPING["ForObjectDetection"](logits[:, :2], labels, "cpu", boxes, config)
from transformers.loss.loss_for_object_detection import box_iou

print([imported, losses, loss.item(), box_iou.__module__, sorted(parts), "scipy" in sys.modules])
"""
NAMES = """
import sys, kvbench
{hooks}
import transformers
from transformers.utils.import_utils import create_import_structure_from_path, define_import_structure
from pathlib import Path
models = Path(transformers.__file__).parent / "models"
exports = define_import_structure(models / "__init__.py", prefix="models")
print(create_import_structure_from_path.__module__, sorted(
    (sorted(packages), sorted((name, sorted(names)) for name, names in modules.items()))
    for packages, modules in exports.items()
))
"""
WITHOUT_HOOKS = (
    "sys.meta_path[:] = [h for h in sys.meta_path if not getattr(h, 'module_name', '').startswith('transf')]"
)


def printed(code: str, cache: Path) -> str:
    environment = os.environ | {"KVBENCH_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_losses_are_imported_when_one_is_called_and_return_the_same(tmp_path: Path) -> None:
    deferred, *losses = ast.literal_eval(printed(LOSSES.format(first="import kvbench"), tmp_path))
    at_once, *expected = ast.literal_eval(printed(LOSSES.format(first=f"import kvbench\n{WITHOUT_HOOKS}"), tmp_path))
    assert losses == expected
    assert (deferred, at_once) == (False, True)


@pytest.mark.slow
def test_names_of_all_models_are_the_same_computed_and_from_the_cache(tmp_path: Path) -> None:
    module_name, expected = printed(NAMES.format(hooks=WITHOUT_HOOKS), tmp_path).split(" ", 1)
    assert module_name == "transformers.utils.import_utils"
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        module_name, names = printed(NAMES.format(hooks=""), tmp_path).split(" ", 1)
        assert (module_name, names) == ("kvbench.engine.lean_transformers", expected)
    (cache_path,) = tmp_path.glob("transformers-*.json")
    content = json.loads(cache_path.read_text())
    for damaged in ({}, content | {"structure": {"": []}}, content | {"structure": {"": [[["torch"], []]]}}):
        cache_path.write_text(json.dumps(damaged))
        assert printed(NAMES.format(hooks=""), tmp_path).split(" ", 1)[1] == expected


class Reader:
    """A stand-in for transformers' module that reads the files of models: it counts them and has names of its own."""

    def __init__(self, package: Path) -> None:
        self.files_read = 0
        self.module = ModuleType("import_utils")
        self.module.__file__ = str(package / "utils" / "import_utils.py")

    def exec_module(self, module: ModuleType) -> None:
        module.create_import_structure_from_path = self.read  # type: ignore[attr-defined]

    def read(self, path: str | Path) -> lean_transformers.Structure:
        files = sorted(file for file in Path(path).rglob("*.py") if not file.name.startswith("convert_"))
        self.files_read += len(files)
        return {"llama": {frozenset({"torch", "vision"}): {file.stem: {file.read_text()} for file in files}}}


def test_a_changed_file_is_read_again_and_other_folders_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    models = tmp_path / "transformers" / "models"
    (models / "llama").mkdir(parents=True)
    (models.parent / "utils").mkdir()
    (models.parent / "utils" / "import_utils.py").touch()
    file = models / "llama" / "modeling.py"
    file.write_text("LlamaModel")

    def names_and_files_read() -> tuple[object, int]:
        lean_transformers._state.cache_clear()  # as in another process
        reader = Reader(models.parent)
        lean_transformers._execute_utils(reader, reader.module)  # type: ignore[arg-type]
        structure = reader.module.create_import_structure_from_path(models)
        return structure["llama"][frozenset({"torch", "vision"})], reader.files_read

    assert names_and_files_read() == ({"modeling": {"LlamaModel"}}, 1)
    assert names_and_files_read() == ({"modeling": {"LlamaModel"}}, 0)
    file.write_text("LlamaFolks")  # of the same size
    os.utime(file, ns=(1, 1))  # the clock of a file system may not have moved on
    assert names_and_files_read() == ({"modeling": {"LlamaFolks"}}, 1)
    (models / "llama" / "configuration.py").write_text("LlamaConfig")
    assert names_and_files_read()[1] == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1, "the names of earlier files are replaced"
    (models / "llama" / "convert_llama.py").symlink_to("nowhere.py")  # has no state; transformers skips such names
    for _ in range(2):
        assert names_and_files_read()[1] == 2
    (models / "llama" / "convert_llama.py").unlink()
    reader = Reader(models.parent)
    lean_transformers._execute_utils(reader, reader.module)  # type: ignore[arg-type]
    for _ in range(2):
        reader.module.create_import_structure_from_path(models / "llama")
    assert reader.files_read == 4
    lean_transformers._state.cache_clear()


class OtherVersion:
    """A stand-in for modules of another version: without the function, and with a table that calls what it imports."""

    def __init__(self, package: Path) -> None:
        self.module = ModuleType("other")
        self.module.__file__ = str(package / "utils" / "import_utils.py")
        self.sees_stand_ins: list[bool] = []

    def exec_module(self, module: ModuleType) -> None:
        self.sees_stand_ins.append("transformers.loss.loss_mine" in sys.modules)
        if self.sees_stand_ins[-1]:
            raise TypeError("a class is needed")


def test_another_version_is_imported_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "loss_mine.py").touch()
    other = OtherVersion(tmp_path)
    lean_transformers._execute_utils(other, other.module)  # type: ignore[arg-type]
    assert not hasattr(other.module, "create_import_structure_from_path")
    lean_transformers._execute_losses(other, other.module)  # type: ignore[arg-type]
    assert other.sees_stand_ins == [False, True, False]
