"""Model-specific files that policies load: learned gates and head profiles.

An `Artifacts` describes one kind of file. It finds the files of a model, reports problems in one line, and computes the
digest that becomes part of a cell's hash. The search order is:

1. the path or shipped artifact that the user names;
2. an artifact shipped with the package for the same model name and weights;
3. an artifact in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UserError
from kvbench.files import State, cache_dir, state_of
from kvbench.named import local_model, model_digest


@dataclass(frozen=True)
class MadeFor:
    """The model that an artifact was made for, according to its metadata.

    Attributes:
        model: The model as the user named it; "" if unknown.
        revision: Hub commit, or digest of the local weights; "" if unknown.
    """

    model: str = ""
    revision: str = ""


@dataclass(frozen=True)
class Artifacts:
    """One kind of model-specific artifact: a file or folder per model and kind.

    Attributes:
        noun: Name in messages, for example "head profile".
        option: Policy parameter with which the user names an artifact.
        shipped: Folder of the artifacts shipped with the package.
        folder: Folder name in the user's cache.
        pattern: Name of a model's file or folder, with the fields `{model}` and `{kind}`.
        command: Command that creates an artifact, with the fields `{model}` and `{kind}`.
        made_for: Returns the model that an artifact was made for.
        files: Files of an artifact that is a folder, the descriptive one first; empty if the artifact is a file.
            Folders can also be downloaded from the hub.
    """

    noun: str
    option: str
    shipped: Path
    folder: str
    pattern: str
    command: str
    made_for: Callable[[Path], MadeFor]
    files: tuple[str, ...] = ()

    def find(self, model: str, artifact_kinds: Sequence[str], requested_path: str | None = None) -> Path:
        """Find the artifact of a model: the named one, a shipped one, or one in the user's cache.

        Args:
            model: `ModelInfo.name`, or a value of `--model`: `reference`, a folder or a hub id.
            artifact_kinds: Kinds to look for, in order of preference; "" if there is only one.
            requested_path: Path or name given by the user, or None; not checked against the model.

        Raises:
            UserError: There is none, or the one in the cache was made for other weights; the message names the command
                that creates it.
        """
        if requested_path is not None:
            return self.locate(requested_path)
        for artifact_kind in artifact_kinds:
            if (artifact_path := self.shipped_path(model, artifact_kind)) is not None:
                return artifact_path
        for artifact_kind in artifact_kinds:
            artifact_path = self.user_path(model, artifact_kind)
            if not self._exists(artifact_path):
                continue
            if local_model(model) is not None and not self._fits(model, artifact_path):
                raise UserError(
                    f"{artifact_path} was made for other weights of {model}; run {self.how(model, artifact_kind)} again"
                )
            return artifact_path
        artifact_kind = f"{artifact_kinds[0]} " if len(artifact_kinds) == 1 and artifact_kinds[0] else ""
        raise UserError(
            f"model {model} has no {artifact_kind}{self.noun}; run {self.how(model, artifact_kinds[0])}, or set "
            f"{self.option}= to a {'folder' if self.files else 'file'}"
        )

    def locate(self, requested_path: str) -> Path:
        """Find an artifact by path, shipped name or, for folders, hub id.

        Raises:
            UserError: There is no such artifact.
        """
        local_path = Path(requested_path).expanduser()
        if self._exists(local_path):
            return local_path
        if self.files and local_path.is_dir():
            raise UserError(f"{self.option}={requested_path}: no {self.files[0]} in that folder")
        if self.files and local_path.is_file():
            raise UserError(f"{self.option}={requested_path} is a file; name the folder that holds {self.files[0]}")
        if re.fullmatch(r"[\w.-]+", requested_path) and self._exists(self.shipped / requested_path):
            return self.shipped / requested_path
        hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", requested_path) and not requested_path.startswith(".")
        if self.files and hub_id:
            return _fetched(self.option, requested_path, self.files)
        raise UserError(f"{self.option}={requested_path}: no such {'folder' if self.files else 'file'}")

    def shipped_path(self, model: str, artifact_kind: str) -> Path | None:
        """Return the shipped artifact of a model, or None."""
        artifact_path = self.shipped / self.pattern.format(model=shipped_name(model), kind=artifact_kind)
        return artifact_path if self._exists(artifact_path) and self._fits(model, artifact_path) else None

    def user_path(self, model: str, artifact_kind: str) -> Path:
        """Return the path of a model's artifact in the user's cache."""
        file_name = self.pattern.format(model=slug(model), kind=artifact_kind)
        return cache_dir() / self.folder / file_name

    def digest(self, artifact_path: Path) -> str:
        """Return a digest of the content of an artifact, 16 hex digits.

        Raises:
            UserError: A file cannot be read.
        """
        file_contents = []
        for file_path in [artifact_path / file_name for file_name in self.files] or [artifact_path]:
            try:
                file_contents.append(file_path.read_bytes())
            except OSError as error:
                raise UserError(f"cannot read {file_path}: {error.strerror}") from None
        if not self.files:
            return hashlib.sha256(file_contents[0]).hexdigest()[:16]
        combined_hash = hashlib.sha256()
        for file_content in file_contents:
            combined_hash.update(hashlib.sha256(file_content).digest())
        return combined_hash.hexdigest()[:16]

    def how(self, model: str, artifact_kind: str) -> str:
        """Return the command that creates an artifact of a model, in backquotes."""
        return f"`{self.command.format(model=model, kind=artifact_kind)}`"

    def _exists(self, artifact_path: Path) -> bool:
        return (artifact_path / self.files[0] if self.files else artifact_path).is_file()

    def _fits(self, model: str, artifact_path: Path) -> bool:
        """Return whether an artifact was made for a model; True if its metadata does not say."""
        main_file = artifact_path / self.files[0] if self.files else artifact_path
        return _compared(self, model, artifact_path, state_of(main_file))


def shipped_name(model: str) -> str:
    """Return the model's part in the name of a shipped artifact: folder, GGUF file or hub name."""
    local_path = local_model(model)
    return model.rpartition("/")[2] if local_path is None else _base_name(local_path)


def slug(model: str) -> str:
    """Return a file name for a model: its hub id, or the name and a hash of its folder or GGUF file."""
    local_path = local_model(model)
    base_name = model if local_path is None else _base_name(local_path)
    slug_text = re.sub(r"[^A-Za-z0-9._]+", "--", base_name).strip("-") or "model"
    if local_path is None:
        return slug_text
    return f"{slug_text}-{hashlib.sha256(str(local_path.resolve()).encode()).hexdigest()[:8]}"


def _base_name(local_path: Path) -> str:
    """Return the name of a model's folder, or of its GGUF file without the suffix."""
    resolved_path = local_path.resolve()
    return resolved_path.stem if resolved_path.is_file() else resolved_path.name


@functools.lru_cache(maxsize=64)
def _compared(artifacts: Artifacts, model: str, artifact_path: Path, file_state: State) -> bool:
    """Compare an artifact with a model, once per file state, because the metadata must be loaded."""
    made_for, local_path = artifacts.made_for(artifact_path), local_model(model)
    if local_path is None:
        return made_for.model == model
    return not made_for.revision or made_for.revision == model_digest(str(local_path))


@functools.cache
def _fetched(option: str, requested_path: str, file_names: tuple[str, ...]) -> Path:
    """Download files of a hub repository to the hub's cache and return their folder."""
    from huggingface_hub import hf_hub_download  # slow to import, and few users need it

    repository, _, revision = requested_path.partition("@")
    try:
        local_paths = [hf_hub_download(repository, file_name, revision=revision or None) for file_name in file_names]
    except Exception as error:  # the hub's errors share no base class
        reason = next(
            (message_line for message_line in str(error).splitlines() if message_line.strip()),
            type(error).__name__,
        )
        raise UserError(f"{option}={requested_path}: no such folder, and the download failed: {reason}") from None
    return Path(local_paths[0]).parent
