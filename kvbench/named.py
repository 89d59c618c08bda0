"""Models by name: a named model, a local folder, a GGUF file or a hub id; digests of local models.

`reference` and `smollm2` are named models, and a package can add others: register a `NamedModel` as
an entry point of the group `kvbench.models`.
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
"""Suffix of a model in one file, which `kvbench.engine.gguf` converts."""


@dataclass(frozen=True)
class NamedModel:
    """A model that `--model` knows by name.

    Attributes:
        name: The name.
        summary: One line for `kvbench list models`.
        folder: Returns the folder that transformers can load, or that holds one GGUF file. Raises
            `UserError` if the model is not installed, with the way to get it.
        lexicon: The lexicon of the prompts that the model can read; see `Benchmark.lexicons`.
        reads: Whether a tokenizer has that lexicon; None if it is "natural".
    """

    name: str
    summary: str
    folder: Callable[[], Path]
    lexicon: str = "natural"
    reads: Callable[[Any], bool] | None = None


def shipped(name: str, folder: Path) -> Callable[[], Path]:
    """The `folder` of a named model whose files are in a package."""

    def found() -> Path:
        if not (folder / "config.json").is_file():
            raise UserError(f"the files of {name} are missing from {folder}")
        return folder

    return found


def knows_only(words: Collection[str]) -> Callable[[Any], bool]:
    """The `reads` of a named model: a tokenizer whose vocabulary is exactly these words."""
    return lambda tokenizer: set(tokenizer.get_vocab()) == set(words)


def named_models() -> dict[str, NamedModel]:
    """All registered models by name.

    Raises:
        UserError: A package that registers one cannot be imported.
    """
    return {name: registry.get(registry.MODELS, name) for name in registry.names(registry.MODELS)}


def lexicon_of(tokenizer: Any) -> str:
    """The lexicon of the prompts that a tokenizer can read; "natural" unless it has its own."""
    for model in named_models().values():
        if model.reads is not None and model.reads(tokenizer):
            return model.lexicon
    return "natural"


def resolve_model(name: str) -> str:
    """Turn the name of a model into where it is: a folder, a GGUF file or a hub id.

    Args:
        name: A named model such as `reference`, a local folder, a GGUF file, or a hub id. A folder
            that has no `config.json` but one GGUF file stands for that file.

    Raises:
        UserError: The folder or file does not exist or is not a model.
    """
    path = local_model(name)
    if path is None:
        return _hub_id(name)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(file.name for file in _gguf_files(path))
        if files:
            raise UserError(
                f"model {name}: the folder has several GGUF files ({', '.join(files)}); "
                f"use --model {path / files[0]} or another of them"
            )
        raise UserError(f"model {name}: the folder has no config.json and no GGUF file")
    if path.is_dir():
        _shards(name, path)
    return str(path)


def local_model(name: str) -> Path | None:
    """The folder or GGUF file of a local model; None for a hub model.

    Raises:
        UserError: A named model is not installed.
    """
    if name in registry.names(registry.MODELS):
        path: Path = registry.get(registry.MODELS, name).folder()
    else:
        path = Path(name).expanduser()
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else _gguf_files(path)
        return files[0] if len(files) == 1 else path
    return path if path.suffix == GGUF and path.is_file() else None


def is_gguf(source: str) -> bool:
    """Whether what `resolve_model` returns is a GGUF file, which has to be converted."""
    return source.endswith(GGUF) and Path(source).is_file()


def _gguf_files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix == GGUF and path.is_file()]


def _hub_id(name: str) -> str:
    """Check that a name that stands for nothing on this machine can be a hub id."""
    if name.endswith(GGUF):
        raise UserError(f"model {name}: no such file")
    repository, mark, revision = name.partition("@")
    if mark:
        raise UserError(f"model {name}: use --model {repository} --revision {revision}")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local or name.count("/") != 1:
        named = registry.names(registry.MODELS)
        raise UserError(
            f"model {name}: no such folder{nearest(name, named)}; use {', '.join(named)}, a local "
            "folder, a GGUF file or a hub id (organisation/name)"
        )
    return name


def model_digest(name: str) -> str:
    """Digest of every file of a local model that can change a response; "" for a hub model.

    For a GGUF model it is the digest of that file alone, so that it does not depend on how the file
    is converted.
    """
    path = Path(resolve_model(name))
    if path.is_file():
        return _digests(name, [path])[0][:16]
    return _folder_digest(name, path) if path.is_dir() else ""


def _folder_digest(name: str, folder: Path) -> str:
    paths = sorted(p for p in folder.iterdir() if p.suffix in _MODEL_FILES and p.is_file())
    paths += [folder / shard for shard in _shards(name, folder) if folder / shard not in paths]
    paths += sorted(folder.glob("additional_chat_templates/*.jinja"))
    digest = hashlib.sha256()
    for path, content in zip(paths, _digests(name, paths), strict=True):
        digest.update(f"{path.relative_to(folder)}|{content}|".encode())
    return digest.hexdigest()[:16]


def _digests(name: str, paths: list[Path]) -> list[str]:
    try:
        return file_digests(paths)
    except OSError as error:
        raise UserError(f"model {name}: cannot read {error.filename}: {error.strerror}") from None


def _shards(name: str, folder: Path) -> list[str]:
    """The files that the index of a sharded checkpoint names, each inside the folder.

    Raises:
        UserError: The index is not valid, or names a file that is missing or outside the folder.
    """
    index = folder / _INDEX
    if not index.is_file() or (folder / "model.safetensors").is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [PurePosixPath(shard) for shard in shards]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"model {name}: {_INDEX} is not a valid index of shards") from None
    for shard, path in zip(shards, paths, strict=True):
        if path.is_absolute() or ".." in path.parts or "\\" in shard:
            raise UserError(f"model {name}: {_INDEX} names {shard!r}, which is outside the folder")
        if not (folder / shard).is_file():
            raise UserError(f"model {name}: {_INDEX} names {shard!r}, which is missing")
    return shards
