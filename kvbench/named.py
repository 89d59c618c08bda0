"""Models by name: a named model, a local folder or a hub id; and the digest of a local model.

`reference` is a named model, and a package can add others: register a `NamedModel` as an entry
point of the group `kvbench.models`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvbench import registry
from kvbench.errors import UserError, nearest
from kvbench.files import file_digests

_MODEL_FILES = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt"})
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class NamedModel:
    """A model that `--model` knows by name.

    Attributes:
        name: The name.
        summary: One line for `kvbench list models`.
        folder: Returns the folder that transformers can load. Raises `UserError` if the model is
            not installed, with the way to get it.
        lexicon: The lexicon of the prompts that the model can read; see `Benchmark.lexicons`.
        reads: Whether a tokenizer has that lexicon; None if it is "natural".
    """

    name: str
    summary: str
    folder: Callable[[], Path]
    lexicon: str = "natural"
    reads: Callable[[Any], bool] | None = None


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
    """Turn the name of a model into what transformers can load: a folder or a hub id.

    Args:
        name: A named model such as `reference`, a local folder, or a hub id.

    Raises:
        UserError: The folder does not exist or is not a model.
    """
    named = registry.names(registry.MODELS)
    if name in named:
        return str(registry.get(registry.MODELS, name).folder())
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model {name}: the folder has no config.json")
        _shards(name, path)
        return str(path)
    repository, mark, revision = name.partition("@")
    if mark:
        raise UserError(f"model {name}: use --model {repository} --revision {revision}")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local or name.count("/") != 1:
        raise UserError(
            f"model {name}: no such folder{nearest(name, named)}; use {', '.join(named)}, a local "
            "folder or a hub id (organisation/name)"
        )
    return name


def model_digest(name: str) -> str:
    """Digest of every file of a local model that can change a response; "" for a hub model."""
    folder = Path(resolve_model(name))
    if not folder.is_dir():
        return ""
    paths = sorted(p for p in folder.iterdir() if p.suffix in _MODEL_FILES and p.is_file())
    paths += [folder / shard for shard in _shards(name, folder) if folder / shard not in paths]
    paths += sorted(folder.glob("additional_chat_templates/*.jinja"))
    digest = hashlib.sha256()
    try:
        for path, content in zip(paths, file_digests(paths), strict=True):
            digest.update(f"{path.relative_to(folder)}|{content}|".encode())
    except OSError as error:
        raise UserError(f"model {name}: cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()[:16]


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
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"model {name}: {_INDEX} is not a valid index of shards") from None
    for shard, path in zip(shards, paths, strict=True):
        if path.is_absolute() or ".." in path.parts or "\\" in shard:
            raise UserError(f"model {name}: {_INDEX} names {shard!r}, which is outside the folder")
        if not (folder / shard).is_file():
            raise UserError(f"model {name}: {_INDEX} names {shard!r}, which is missing")
    return shards
