"""Models by name: a named model, a local folder, a GGUF file or a hub id; digests of local models.

`reference` and `smollm2` are named models. To add others, register a `NamedModel` as an entry point of the group
`kvbench.models`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvbench import registry
from kvbench.errors import UserError, nearest
from kvbench.files import file_digests

_MODEL_FILES = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt"})
_INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
"""Suffix of single-file models, which `kvbench.engine.gguf` converts."""


@dataclass(frozen=True)
class NamedModel:
    """A model that `--model` knows by name.

    Attributes:
        name: Value of `--model`.
        summary: One line for `kvbench list models`.
        folder: Returns a folder that transformers can load, or that holds one GGUF file. Raises `UserError` with
            instructions if the model is not installed.
        lexicon: Lexicon of the prompts that the model understands; see `Benchmark.lexicons`.
        reads: Returns whether a tokenizer belongs to that lexicon; None if it is "natural".
    """

    name: str
    summary: str
    folder: Callable[[], Path]
    lexicon: str = "natural"
    reads: Callable[[Any], bool] | None = None


def shipped(model_name: str, folder: Path) -> Callable[[], Path]:
    """Return the `folder` function of a named model whose files are in a package."""

    def find_folder() -> Path:
        if not (folder / "config.json").is_file():
            raise UserError(f"the files of {model_name} are missing from {folder}; reinstall the package")
        return folder

    return find_folder


def knows_only(words: Collection[str]) -> Callable[[Any], bool]:
    """Return a `reads` function that accepts tokenizers whose vocabulary is exactly these words."""
    return lambda tokenizer: set(tokenizer.get_vocab()) == set(words)


def named_models() -> dict[str, NamedModel]:
    """Return all registered models by name.

    Raises:
        UserError: A package that registers one cannot be imported.
    """
    return {model_name: registry.get(registry.MODELS, model_name) for model_name in registry.names(registry.MODELS)}


def lexicon_of(tokenizer: Any) -> str:
    """Return the lexicon for a tokenizer; "natural" unless a named model claims the tokenizer."""
    for named_model in named_models().values():
        if named_model.reads is not None and named_model.reads(tokenizer):
            return named_model.lexicon
    return "natural"


def resolve_model(model_name: str) -> str:
    """Resolve the name of a model to a folder, a GGUF file or a hub id.

    Args:
        model_name: A named model such as `reference`, a local folder, a GGUF file, or a hub id. A folder with no
            `config.json` but one GGUF file stands for that file.

    Raises:
        UserError: The folder or file does not exist or is not a model.
    """
    local_path = local_model(model_name)
    if local_path is None:
        return _hub_id(model_name)
    if local_path.is_dir() and not (local_path / "config.json").is_file():
        gguf_names = sorted(gguf_path.name for gguf_path in _gguf_files(local_path))
        if gguf_names:
            raise UserError(
                f"model {model_name}: the folder has several GGUF files ({', '.join(gguf_names)}); "
                f"use --model {local_path / gguf_names[0]} or another of them"
            )
        raise UserError(f"model {model_name}: the folder has no config.json and no GGUF file")
    if local_path.is_dir():
        _shards(model_name, local_path)
    return str(local_path)


def local_model(model_name: str) -> Path | None:
    """Return the folder or GGUF file of a local model; None for a hub model.

    Raises:
        UserError: A named model is not installed.
    """
    if model_name in registry.names(registry.MODELS):
        local_path: Path = registry.get(registry.MODELS, model_name).folder()
    else:
        local_path = Path(model_name).expanduser()
    if local_path.is_dir():
        gguf_paths = [] if (local_path / "config.json").is_file() else _gguf_files(local_path)
        return gguf_paths[0] if len(gguf_paths) == 1 else local_path
    return local_path if local_path.suffix == GGUF and local_path.is_file() else None


def is_gguf(model_source: str) -> bool:
    """Return whether a result of `resolve_model` is a GGUF file, which must be converted."""
    return model_source.endswith(GGUF) and Path(model_source).is_file()


def _gguf_files(folder: Path) -> list[Path]:
    return [file_path for file_path in folder.iterdir() if file_path.suffix == GGUF and file_path.is_file()]


def _hub_id(model_name: str) -> str:
    """Validate that a name that is not a local model can be a hub id."""
    if model_name.endswith(GGUF):
        raise UserError(f"model {model_name}: no such file")
    if Path(model_name).expanduser().is_file():
        raise UserError(f"model {model_name} is a file, but not a GGUF file; use the folder of a model or a GGUF file")
    repository, separator, revision = model_name.partition("@")
    if separator:
        raise UserError(f"model {model_name}: use --model {repository} --revision {revision}")
    looks_local = model_name.startswith((".", "/", "~")) or model_name.count("/") > 1
    if looks_local or model_name.count("/") != 1:
        model_names = registry.names(registry.MODELS)
        raise UserError(
            f"model {model_name}: no such folder{nearest(model_name, model_names)}; use "
            f"{', '.join(model_names)}, a local folder, a GGUF file or a hub id (organisation/name)"
        )
    return model_name


def model_digest(model_name: str) -> str:
    """Return a digest of all files of a local model that can change a response; "" for a hub model.

    For a GGUF model, only that file counts, so that the digest does not depend on the conversion.
    """
    local_path = Path(resolve_model(model_name))
    if local_path.is_file():
        return _digests(model_name, [local_path])[0][:16]
    return _folder_digest(model_name, local_path) if local_path.is_dir() else ""


def _folder_digest(model_name: str, folder: Path) -> str:
    file_paths = sorted(
        file_path for file_path in folder.iterdir() if file_path.suffix in _MODEL_FILES and file_path.is_file()
    )
    file_paths += [
        folder / shard_name for shard_name in _shards(model_name, folder) if folder / shard_name not in file_paths
    ]
    file_paths += sorted(folder.glob("additional_chat_templates/*.jinja"))
    folder_hash = hashlib.sha256()
    for file_path, file_digest in zip(file_paths, _digests(model_name, file_paths), strict=True):
        folder_hash.update(f"{file_path.relative_to(folder)}|{file_digest}|".encode())
    return folder_hash.hexdigest()[:16]


def _digests(model_name: str, file_paths: list[Path]) -> list[str]:
    try:
        return file_digests(file_paths)
    except OSError as error:
        raise UserError(f"model {model_name}: cannot read {error.filename}: {error.strerror}") from None


def _shards(model_name: str, folder: Path) -> list[str]:
    """Return the files in the index of a sharded checkpoint, all inside the folder.

    Raises:
        UserError: The index is not valid, or names a file that is missing or outside the folder.
    """
    index_path = folder / _INDEX
    if not index_path.is_file() or (folder / "model.safetensors").is_file():
        return []
    try:
        shard_names = sorted(set(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].values()))
        shard_paths = [PurePosixPath(shard_name) for shard_name in shard_names]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"model {model_name}: {_INDEX} is not a valid index of shards") from None
    for shard_name, shard_path in zip(shard_names, shard_paths, strict=True):
        if shard_path.is_absolute() or ".." in shard_path.parts or "\\" in shard_name:
            raise UserError(f"model {model_name}: {_INDEX} names {shard_name!r}, which is outside the folder")
        if not (folder / shard_name).is_file():
            raise UserError(f"model {model_name}: {_INDEX} names {shard_name!r}, which is missing")
    return shard_names
